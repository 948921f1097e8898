"""A run that stalls: one line names the rank that keeps the others waiting, and its place in the user's code."""

import os
import signal
import socket
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.commands.run.outcome import ends_together
from cnnstrategies.runtime import stalls
from cnnstrategies.runtime.stalls import RankPosition, line_about, position_in
from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    SpatialStrategy,
)
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.forked import run_forked
from tests.runner.ranks import run_started

HOST = socket.gethostname()


def frame(path: str, name: str, line: int = 7) -> traceback.FrameSummary:
    return traceback.FrameSummary(path, line, name)


@pytest.mark.light
@pytest.mark.parametrize(
    ("innermost", "place", "waits"),
    [
        ([], "train.py:7 in training_step", False),
        (
            [frame(os.__file__, "read")],
            "train.py:7 in training_step",
            False,
        ),
        (
            [frame(torch.distributed.__file__, "all_reduce")],
            "__init__.py:7 in all_reduce, called at train.py:7 in training_step",
            True,
        ),
        ([frame(zmq.__file__, "poll")], "__init__.py:7 in poll, called at train.py:7 in training_step", True),
        (
            [frame(torch.utils.data.__file__, "get_data")],
            "__init__.py:7 in get_data, called at train.py:7 in training_step",
            False,
        ),
    ],
)
def test_the_users_innermost_line_is_the_place(innermost: list[Any], place: str, waits: bool) -> None:
    stack = [frame(torch.__file__, "run"), frame("/home/user/train.py", "training_step"), *innermost]
    assert position_in(stack) == (place, waits)


@pytest.mark.light
def test_a_line_names_the_ranks_for_which_the_others_wait() -> None:
    def line(places: dict[int, tuple[str, bool]]) -> str:
        answers = {rank: RankPosition(rank, HOST, 2**22 + rank, *place) for rank, place in places.items()}
        members = {rank: RankPosition(rank, HOST, 2**22 + rank, "", False) for rank in range(3)}
        return line_about(answers, members, 70.0, Path("stalls"))

    step, reduce = ("train.py:9 in training_step", False), ("ddp.py:3 in all_reduce", True)
    assert line({0: reduce, 1: step, 2: reduce}) == (
        f"no batch has begun or ended for 70 s: rank 1 (process {2**22 + 1} on {HOST}) is not in a collective, but at "
        "train.py:9 in training_step; stacks of the ranks: stalls"
    )
    assert f"rank 2 (process {2**22 + 2} on {HOST}) does not answer: " in line({0: reduce, 1: reduce})
    assert "all ranks wait in collectives that do not match: rank 0 at ddp.py:3 in all_reduce, rank 1 at" in line(
        {0: reduce, 1: reduce, 2: reduce}
    )
    assert "all ranks work on one batch: rank 0 at train.py:9" in line({0: step, 1: step, 2: step})


class Stalls(Callback):
    """Stalls a rank in a batch until the line is printed, by a loop or by a signal."""

    def __init__(self, rank: int, stops: bool) -> None:
        self.rank = rank
        self.stops = stops

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4 and trainer.global_rank == self.rank:
            Path("rank").write_text(str(os.getpid()))
            if self.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            while not Path("told").exists():
                time.sleep(0.02)


def fit(strategy: Any, rank: int, stops: bool) -> None:
    """Train with a stalled rank, which goes on when the line is printed."""
    for watch in (stalls.StallWatch, stalls.WorkerStallWatch):

        def tell_and_continue(self: Any, *arguments: Any, tell: Any = watch.tell) -> None:
            tell(self, *arguments)
            Path("told").touch()
            if stops:
                os.kill(int(Path("rank").read_text()), signal.SIGCONT)

        watch.tell = tell_and_continue  # type: ignore[method-assign]
    data = TensorDataset(torch.rand(128, 1, 8, 8), torch.zeros(128, dtype=torch.int64))
    trainer = quiet_trainer(strategy(), 2, callbacks=[Stalls(rank, stops)], max_epochs=1)
    with ends_together(trainer, Interconnect()):
        trainer.fit(ImageClassifier(PlainCNN(), num_classes=10), DataLoader(data, batch_size=8))


@pytest.mark.parametrize(
    ("strategy", "rank", "stops"),
    [
        (lambda: "ddp", 1, False),
        (lambda: "ddp", 1, True),
        (lambda: "ddp", 0, True),
        (BalancedDDPStrategy, 1, True),
        (partial(HybridPipelineStrategy, cuts=["2"]), 1, False),
        (SpatialStrategy, 1, False),
    ],
    ids=["ddp", "ddp, stopped", "ddp, rank 0 stopped", "ddp_balanced, stopped", "hybrid_pipeline", "spatial"],
)
def test_a_stalled_rank_is_named_once_and_the_run_goes_on(
    strategy: Any, rank: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"POLL": 0.05, "SHORTEST": 1.0, "MULTIPLE": 0.0, "ANSWER": 1.0}.items():
        monkeypatch.setattr(stalls, name, seconds)
    code, output = run_forked(lambda: print("codes", run_started(2, lambda: fit(strategy, rank, stops))), timeout=100)
    assert code == 0, output
    assert "codes [0, 0]" in output
    (line,) = [line for line in output.splitlines() if line.startswith("no batch has begun or ended for ")]
    process = Path("rank").read_text()
    assert f"rank {rank} (process {process} on {HOST}) is " in line
    if stops:
        assert f"is stopped by a signal: continue it with kill -CONT {process}" in line
    else:
        assert "is not in a collective, but at test_stalls.py:" in line
        assert "in on_train_batch_start; stacks of the ranks: " in line
        assert "time.sleep(0.02)" in next(Path().rglob("stalls/rank-1.txt")).read_text()
    assert f"rank {1 - rank}" not in line


def test_a_worker_that_stalls_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"POLL": 0.05, "SHORTEST": 1.0, "MULTIPLE": 0.0}.items():
        monkeypatch.setattr(stalls, name, seconds)
    servers = partial(ParameterServerStrategy, start_method="fork")
    code, output = run_forked(lambda: fit(servers, 1, stops=False), timeout=100)
    assert code == 0, output
    # On a slow machine worker 0 may stall as well.
    lines = [line for line in output.splitlines() if line.startswith("no batch has begun or ended for ")]
    line = next(line for line in lines if "worker 1" in line)
    assert f"worker 1 (process {Path('rank').read_text()} on {HOST}) does not wait for other processes, but is" in line
    assert "is at test_stalls.py:" in line
    assert "in on_train_batch_start; its stack: " in line
    assert "time.sleep(0.02)" in next(Path().rglob("stalls/rank-1.txt")).read_text()


@pytest.mark.light
def test_a_server_that_hangs_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that waits for messages has no line, and one that hangs has one line."""
    for name, seconds in {"POLL": 0.02, "SHORTEST": 100.0, "MULTIPLE": 0.0}.items():
        monkeypatch.setattr(stalls, name, seconds)
    watch = stalls.ServerStallWatch(3, tmp_path / "stalls").start()
    lines: list[str] = []
    for _ in range(20):
        watch.move()
        time.sleep(0.02)
    lines += capsys.readouterr().err.splitlines()
    assert lines == []
    monkeypatch.setattr(stalls, "SHORTEST", 1.0)
    deadline = time.monotonic() + 30
    while not lines and time.monotonic() < deadline:
        time.sleep(0.02)
        lines += capsys.readouterr().err.splitlines()
    time.sleep(0.1)
    watch.close()
    (line,) = [*lines, *capsys.readouterr().err.splitlines()]
    assert line.startswith(f"server 3 (process {os.getpid()} on {HOST}) has answered no worker for ")
    assert ", and is at test_stalls.py:" in line
    assert "in test_a_server_that_hangs_says_where_it_is" in (tmp_path / "stalls" / "server-3.txt").read_text()
