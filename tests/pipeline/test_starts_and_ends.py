"""Tests of the ranks' ends: no thread of a process group is left when the interpreter ends.

If a group's thread is left, C++ may abort the process after a correct result (exit code -6, `terminate called without
an active exception`), in one run of many and only on busy CPUs. So each rank looks for threads after all functions that
it registered with `atexit`.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import GracefulStop
from cnnstrategies.cli import main
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.runner.ranks import run_started

kept: list[Pipeline] = []  # Keeps pipelines alive, like global variables of a script.


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def run_engine() -> None:
    """Run a script with plain torch as one rank."""
    dist.init_process_group("gloo")
    with Pipeline(make_network(), ["0"], (1, 2), 4) as pipeline:
        images, targets = torch.randn(8, 1, 8, 8), torch.randint(5, (8,))
        optimizer = torch.optim.SGD(
            pipeline.module.parameters(), lr=0.1
        )  # The optimizer's first step imports much of torch.
        for _ in range(2):
            pipeline.step(images, targets, F.cross_entropy)
            optimizer.step()
        pipeline.merge()
    kept.append(pipeline)
    dist.destroy_process_group()


def run_strategy() -> None:
    """Run a script with a Trainer as one rank. The strategy must destroy the default group."""
    strategy = HybridPipelineStrategy(replicas=[2, 1], cuts=["0"], microbatches=4)
    trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, max_steps=2, barebones=True)
    data = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(5, (32,)))
    trainer.fit(ImageClassifier(make_network(), 5), DataLoader(data, batch_size=8))


def run_command() -> None:
    """Run the command line with Lightning's DDP as one rank. The command must destroy the default group."""
    _command(1)


def run_stopped_command() -> None:
    """Run the command line as one rank that receives SIGTERM in its first step."""

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
    few = ("--trainer.max_epochs=1", f"--trainer.limit_train_batches={batches}", "--trainer.limit_val_batches=1")
    main(["fit", "--config", "quickstart", "--trainer.accelerator=cpu", *few])


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (run_engine, 3),
        (run_strategy, 3),
        pytest.param(run_command, 2, marks=pytest.mark.cluster),
        (run_stopped_command, 2),
    ],
)
def test_no_thread_of_a_group_is_left_when_the_interpreter_ends(run: Callable[[], None], ranks: int) -> None:
    def rank() -> None:
        number = os.environ["LOCAL_RANK"]
        at_the_end: list[Callable[[], object]] = []
        os.environ.update(TORCHELASTIC_RUN_ID="none", RANK=number, GROUP_RANK="0", WORLD_SIZE=str(ranks))
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        with mock.patch.object(atexit, "register", at_the_end.append):
            run()
        for function in reversed(at_the_end):
            function()
        names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        if left := [name for name in names if "gloo" in name]:
            sys.exit(f"threads left: {left}")

    assert run_started(ranks, rank) == [0] * ranks
