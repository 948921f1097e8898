"""Start and end ranks, and look at how each ends.

A process ends badly where a thread of a group is still there: then C++ may abort it (exit code -6, `terminate called
without an active exception`) after a right result, in one run of many and only where processors are scarce. So each
rank looks, as the last thing that it does, whether there is one. All starts are forks of one process that has
imported everything: they end as programs do, and start in a fraction of the time.
"""

import atexit
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.stage import divide_by_names

sys.path.append(str(Path(__file__).resolve().parents[1]))
from ports import free_port  # Not the system's: what another process has taken meanwhile hangs two ranks.

LAYOUTS = ((1, 2), (2, 1), (1, 1, 1), (1, 2))
RANKS = 3
SECONDS = 100.0  # for one start; then each rank that is left says where it is, and ends
THREADS_LEFT = "threads left:"
kept: list[Pipeline] = []  # As in a script whose variables are global.


def look_for_threads() -> None:
    """Say which threads of groups are left, when nothing but the end of the interpreter is to come."""
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if left := [name for name in names if "gloo" in name]:
        print(THREADS_LEFT, left, flush=True)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def run_engine(replicas: tuple[int, ...]) -> None:
    """What a script with plain torch does, in one rank."""
    atexit.register(look_for_threads)
    dist.init_process_group("gloo")
    with Pipeline(make_network(), ["0", "2"][: len(replicas) - 1], replicas, 4) as pipeline:
        images, targets = torch.randn(8, 1, 8, 8), torch.randint(5, (8,))
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)  # Its first step imports much of torch.
        for _ in range(2):
            pipeline.step(images, targets, F.cross_entropy)
            optimizer.step()
        pipeline.merge()
    kept.append(pipeline)
    dist.destroy_process_group()


def run_strategy(replicas: tuple[int, ...]) -> None:
    """What a script with a Trainer does, in one rank; it leaves the end of the default group to the strategy."""
    atexit.register(look_for_threads)  # First, and so the last that runs.
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from cnnstrategies import ImageClassifier
    from cnnstrategies.strategies import HybridPipelineStrategy

    cuts = ["0", "2"][: len(replicas) - 1]
    strategy = HybridPipelineStrategy(replicas=list(replicas), cuts=cuts, microbatches=4)
    trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=2, barebones=True)
    data = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(5, (32,)))
    trainer.fit(ImageClassifier(make_network(), 5), DataLoader(data, batch_size=8))


def run_command(replicas: tuple[int, ...]) -> None:
    """What the command line does, in one rank, with Lightning's DDP: all that ends the group is the command."""
    _command(1)


def run_stopped_command(replicas: tuple[int, ...]) -> None:
    """The same, where each rank receives SIGTERM in its first step."""
    from lightning.pytorch import LightningModule, Trainer

    from cnnstrategies.callbacks import GracefulStop

    def stop(self: GracefulStop, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    GracefulStop.on_before_zero_grad = stop  # type: ignore[method-assign]
    code: object = None
    try:
        _command(20)
    except SystemExit as stopped:
        code = stopped.code
    if code != (0 if int(os.environ["RANK"]) else 128 + signal.SIGTERM):
        sys.exit(f"exit code {code}")


def _command(batches: int) -> None:
    atexit.register(look_for_threads)
    from cnnstrategies.cli import main

    few = ("--trainer.max_epochs=1", f"--trainer.limit_train_batches={batches}", "--trainer.limit_val_batches=1")
    split = (f"--trainer.devices={RANKS}", "--data.global_batch_size=63")
    main(["fit", "--config", "quickstart", "--trainer.accelerator=cpu", *split, *few])


def fork_ranks(function: Callable[[tuple[int, ...]], None], replicas: tuple[int, ...], log: Path) -> list[int]:
    """Exit codes of the ranks, each forked from this process and ended as the interpreter ends a program."""
    port = str(free_port())
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            number, size = str(rank), str(RANKS)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="none")
            os.environ.update(RANK=number, LOCAL_RANK=number, GROUP_RANK="0")
            os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                faulthandler.enable(os.fdopen(os.dup(2), "w"), all_threads=True)  # For SIGABRT below.
            os.chdir(log.parent)
            function(replicas)
            sys.exit(0)
        pids.append(pid)
    deadline = time.monotonic() + SECONDS
    return [_exit_code(pid, deadline) for pid in pids]


def _exit_code(pid: int, deadline: float) -> int:
    for until, at_its_end in ((deadline, signal.SIGABRT), (deadline + 5, signal.SIGKILL)):
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(pid, at_its_end)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def main() -> None:
    """Start each kind once, and say how it has ended where that is bad."""
    torch.set_num_threads(1)
    # Import what the ranks need, and spare them copying all that is imported when they end.
    import lightning.pytorch  # noqa: F401
    import sympy  # noqa: F401  # By tracing.
    from torch import _dynamo  # noqa: F401  # By an optimizer.

    import cnnstrategies.strategies  # noqa: F401

    divide_by_names(make_network(), ["0"])
    gc.collect()
    gc.freeze()
    for replicas, run in zip(LAYOUTS, (run_engine, run_strategy, run_command, run_stopped_command), strict=True):
        log = Path(f"{run.__name__}.log").resolve()
        codes = fork_ranks(run, replicas, log)
        text = log.read_text()
        if any(codes) or "terminate called" in text or THREADS_LEFT in text:
            sys.exit(f"{run.__name__}: exit codes {codes}\n{text[-3000:]}")


@pytest.mark.warm
def test_no_thread_of_a_group_is_left_when_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main()
