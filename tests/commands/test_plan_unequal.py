"""``plan --have`` and ``plan --largest_batch`` with real trainings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

pytestmark = pytest.mark.cluster
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
GREEDY = """
import os, signal
from lightning.pytorch import Callback

class Greedy(Callback):
    '''Rank 1 runs out of memory in the second step with more than 40 samples, as `way` says.'''

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1 and len(batch[0]) > 40:
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
"""


def run(folder: Path, *words: str) -> str:
    """Run the program in a folder, and return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "cnnstrategies", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.warm
def test_fit_runs_each_plan_for_unequal_devices(tmp_path: Path) -> None:
    text = run(tmp_path, "plan", "--config", QUICKSTART, "--have=1x24GiB@1.0, 2x8GiB@0.4", "--bandwidth=1000")
    assert text.count("busy limited by") == 3
    for file in ("plan.yaml", "plan_2.yaml", "plan_3.yaml"):
        assert f"train with cnnstrategies fit --config {file}" in text
        written = yaml.safe_load((tmp_path / file).read_text())
        assert (written["trainer"]["num_nodes"], written["trainer"]["devices"]) == (1, 3)
        assert written["data"]["init_args"]["global_batch_size"] == 64
    run(tmp_path, "fit", "--config", "plan.yaml", "--trainer.max_steps=2", "--trainer.limit_val_batches=1")


# A rank that is killed is not the child of a trial that started warm.
@pytest.mark.parametrize("way", ["killed", pytest.param("refused", marks=pytest.mark.warm)])
def test_a_rank_that_runs_out_of_memory_ends_the_trial_and_not_the_command(tmp_path: Path, way: str) -> None:
    """Rank 1 gets 48 samples of the predicted batch, and 38 in the third trial."""
    (tmp_path / "greedy.py").write_text(GREEDY)
    words = ["--config", QUICKSTART, "--bandwidth=1000", "--largest_batch", "--have=2x3MiB"]
    callback = ["--trainer.callbacks+=greedy.Greedy", f"--trainer.callbacks.way={way}"]
    text = " ".join(run(tmp_path, "plan", *words, *callback).split())
    (predicted,) = map(int, re.findall(r"Largest batch by prediction: (\d+) samples", text))
    assert f"Not confirmed: with {predicted} samples a rank ran out of memory" in text
    (confirmed,) = map(int, re.findall(r"Confirmed: (\d+) samples, with 2 steps on all 2 ranks together", text))
    assert confirmed < predicted
