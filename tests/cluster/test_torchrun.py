"""The real torchrun: a killed rank, and the run goes on."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from cluster.processes_of import PYTHON, Program, fit

from cnnstrategies.cluster.run_name import run_name
from cnnstrategies.errors import ConfigurationError

EPOCHS = 12
BATCHES = ("--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2")
RENDEZVOUS = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=digits")


# The other worker waits for the dead one's gradient as long as `timeout`.
SERVER = ("--trainer.strategy=ParameterServerStrategy", "--trainer.strategy.init_args.timeout=4")


@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("strategy", "launch", "folder"),
    [
        (("--trainer.strategy=ddp",), RENDEZVOUS, "torchrun_digits"),
        (("--trainer.strategy=hybrid_pipeline",), ("--nnodes=1",), "torchrun_*"),
        (SERVER, RENDEZVOUS, "torchrun_digits"),
    ],
    ids=["ddp", "hybrid_pipeline", "parameter_server"],
)
def test_after_a_rank_is_killed_the_run_goes_on_from_its_last_checkpoint_in_the_same_folder(
    tmp_path: Path, strategy: tuple[str, ...], launch: tuple[str, ...], folder: str
) -> None:
    arguments = fit(*strategy, f"--trainer.max_epochs={EPOCHS}", *BATCHES)
    torchrun = Program([*TORCHRUN, *launch, *arguments], tmp_path / "log")
    pattern = f"runs/quickstart/{folder}/checkpoints/last.ckpt"
    torchrun.wait_until(lambda: bool(list(tmp_path.glob(pattern))))
    os.kill(torchrun.rank(1), signal.SIGKILL)
    assert torchrun.wait() == 0, torchrun.output()
    assert len(re.findall(r"Going on from .*last\.ckpt", torchrun.output())) == 1, torchrun.output()
    (path,) = tmp_path.glob(pattern)
    checkpoint = torch.load(path, weights_only=True)
    history = next(state["history"] for state in checkpoint["callbacks"].values() if "history" in state)
    assert list(history) == list(range(EPOCHS))  # Every epoch was trained, and none twice.
    assert os.listdir(tmp_path / "runs/quickstart") == [path.parents[1].name]


def test_restarts_need_a_name_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_name() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_name() is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigurationError, match="--rdzv-id"):
        run_name()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    assert run_name() == "torchrun_digits"
