"""Start and end ranks under load, many times, and look at how each ends.

    python tests/pipeline/test_starts_and_ends.py --forked 200 --strategy 100 --command 50 --stopped 50

A process ends badly where a thread of a group is still there: then C++ may abort it (exit code -6, `terminate called
without an active exception`) after a right result, in one run of many and only where processors are scarce. So each
rank also looks, as the last thing that it does, whether there is one. All starts are forks of one process that has
imported everything: they end as programs do, and start in a fraction of the time.
"""

import argparse
import atexit
import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
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

LAYOUTS = ((1, 2), (2, 1), (1, 1, 1))
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


def warm_up(with_lightning: bool) -> None:
    """Import what the ranks need, and spare them copying all that is imported when they end."""
    if with_lightning:
        import lightning.pytorch  # noqa: F401

        import cnnstrategies.strategies  # noqa: F401
    import sympy  # noqa: F401  # By tracing.
    import torch._dynamo  # noqa: F401  # By an optimizer.

    divide_by_names(make_network(), ["0"])
    gc.collect()
    gc.freeze()


def busy() -> int:
    """A process that takes a processor until it is killed."""
    parent = os.getpid()
    pid = os.fork()
    while pid == 0:
        if os.getppid() != parent:
            os._exit(0)
        sum(range(100_000))
    return pid


def main() -> None:
    """Count how the ranks end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--forked", type=int, default=0, help="starts of the engine, forked")
    parser.add_argument("--strategy", type=int, default=0, help="starts of the strategy, forked")
    parser.add_argument("--command", type=int, default=0, help="starts of the command line with ddp, forked")
    parser.add_argument("--stopped", type=int, default=0, help="starts of the same that are stopped, forked")
    parser.add_argument("--busy", type=int, default=3, help="processes beside that keep the processors busy")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with_lightning = arguments.strategy or arguments.command or arguments.stopped
    warm_up(bool(with_lightning))
    kinds = [
        ("engine", arguments.forked, run_engine),
        ("strategy", arguments.strategy, run_strategy),
        ("command", arguments.command, run_command),
        ("stopped command", arguments.stopped, run_stopped_command),
    ]
    parent = os.getpid()
    load = [busy() for _ in range(arguments.busy)]
    directory = Path(tempfile.mkdtemp())
    bad = 0
    try:
        for name, times, run in kinds:
            bad += repeat(name, times, run, directory)
    finally:
        if os.getpid() == parent:  # A rank comes through here, too, on its way out.
            for pid in load:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            shutil.rmtree(directory)
    sys.exit(bad > 0)


def repeat(name: str, times: int, run: Callable[[tuple[int, ...]], None], directory: Path) -> int:
    """Start many times and say how it went; gives the number of bad ends."""
    codes: Counter[int] = Counter()
    bad = 0
    for index in range(times):
        log = directory / f"{index}.log"
        found = fork_ranks(run, LAYOUTS[index % len(LAYOUTS)], log)
        codes.update(found)
        text = log.read_text()
        log.unlink()
        if any(found) or "terminate called" in text or THREADS_LEFT in text:
            bad += 1
            print(f"{name} {index}: exit codes {found}\n{text[-3000:]}", flush=True)
    if times:
        print(
            f"{name}: {times} starts, {bad} bad, load {os.getloadavg()[0]:.0f}; exit codes: {dict(codes)}", flush=True
        )
    return bad


@pytest.mark.warm
def test_no_thread_of_a_group_is_left_when_the_interpreter_ends() -> None:
    """It aborts the process, now and then: larger numbers look for that."""
    kinds = [f"--{kind}=1" for kind in ("forked", "strategy", "command", "stopped")]
    command = [sys.executable, __file__, *kinds, "--busy=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 starts, 0 bad") == len(kinds)


if __name__ == "__main__":
    main()
