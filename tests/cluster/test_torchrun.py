"""A run under the real torchrun goes on after a rank dies."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.cluster.exceptions import KILLED
from tests.cluster.processes_of import PYTHON, Program, fit
from tests.runner.ports import free_port
from tests.strategies.fault_injection import fault_arguments

EPOCHS = 4
BATCHES = ("--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2")
RENDEZVOUS = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=digits")
STATIC = ("--nnodes=1", "--master-addr=127.0.0.1", "--master-port")
# The living worker waits for the dead worker's gradient for `timeout` seconds.
SERVER = ("--trainer.strategy=ParameterServerStrategy", "--trainer.strategy.init_args.timeout=8")


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize(
    ("strategy", "launch", "folder"),
    [
        (("--trainer.strategy=hybrid_pipeline",), RENDEZVOUS, "torchrun_digits"),
        ((*SERVER, "--run_name=mine"), STATIC, "mine"),
    ],
    ids=["hybrid_pipeline", "parameter_server"],
)
def test_after_a_ranks_death_the_run_resumes_in_its_folder(
    tmp_path: Path, strategy: tuple[str, ...], launch: tuple[str, ...], folder: str
) -> None:
    if launch == STATIC:
        launch = (*launch, str(free_port()))
    arguments = fit(*strategy, f"--trainer.max_epochs={EPOCHS}", *BATCHES, *fault_arguments(step=9))
    torchrun = Program([*TORCHRUN, *launch, *arguments], tmp_path / "log", PYTHONPATH=os.pathsep.join(sys.path))
    assert torchrun.wait() == 0, torchrun.output()
    assert len(re.findall(r"Continuing from .*last\.ckpt", torchrun.output())) == 1, torchrun.output()
    # torchrun sends SIGTERM to the living rank at the same time.
    killed = re.findall(KILLED.format(9), torchrun.output())
    assert len(killed) == torchrun.output().count("it had held") == 1, torchrun.output()
    (path,) = tmp_path.glob(f"runs/quickstart/{folder}/checkpoints/last.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    history = next(state["history"] for state in checkpoint["callbacks"].values() if "history" in state)
    assert list(history) == list(range(EPOCHS))  # Every epoch was trained exactly once.
    assert os.listdir(tmp_path / "runs/quickstart") == [path.parents[1].name]


@pytest.mark.cluster
@pytest.mark.warm
def test_two_torchruns_with_one_endpoint_train_apart(tmp_path: Path) -> None:
    """Both runs find their ranks in the store of the first torchrun, which runs until the second run has ended.

    Rank 0 of the first run waits for the checkpoint of the second run, while its rank 1 looks for it.
    """
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    last = tmp_path / "runs/quickstart/second/checkpoints/last.ckpt"
    torchrun = (PYTHON, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d")
    awaited = {"first": last, "second": tmp_path}

    def start(name: str, epochs: int) -> Program:
        _, _, *arguments = fit(f"--run_name={name}", f"--trainer.max_epochs={epochs}", *BATCHES)
        program = ("-m", "tests.cluster.late_start", str(awaited[name]), *arguments)
        words = [*torchrun, endpoint, f"--rdzv-id={name}", *program]
        return Program(words, tmp_path / name, PYTHONPATH=os.pathsep.join(sys.path))

    first = start("first", 2)
    first.wait_until((tmp_path / "started-first-1").exists)
    second = start("second", 1)
    for name, epochs, program in (("second", 1, second), ("first", 2, first)):
        assert program.wait() == 0, first.output() + second.output()
        checkpoint = torch.load(tmp_path / f"runs/quickstart/{name}/checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 4 * epochs
