"""An exception on one rank, or on all ranks, ends all ranks, also if a checkpoint is saved because of the exception."""

import queue
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed import HashStore
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies._lightning_private import ScriptLauncher
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.commands.run.outcome import ends_together
from cnnstrategies.runtime import failure_watch
from cnnstrategies.runtime.failure_store import LONGEST, FailureStore, RankFailure
from cnnstrategies.runtime.failure_watch import GRACE, PATIENCE, Countdown, FailureWatch
from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    SpatialStrategy,
    failing,
    meeting,
)
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.forked import run_forked
from tests.runner.patience import at_most
from tests.runner.ranks import run_started

BOOM = RankFailure(1, "host-b", 7, "ValueError: boom", 1)
GONE = RankFailure(0, "host-a", 8, "RuntimeError: Connection closed by peer", 1)


# The reports


@pytest.mark.light
def test_all_ranks_learn_which_rank_has_failed_first():
    store = HashStore()
    ranks = [FailureStore(store, call=0, world_size=2) for _ in range(2)]
    assert [rank.first() for rank in ranks] == [None, None]
    assert ranks[1].report(BOOM) == BOOM
    assert ranks[0].report(GONE) == BOOM, "the failure of rank 0 is a consequence"
    assert [rank.first() for rank in ranks] == [BOOM, BOOM]
    assert FailureStore(store, call=1, world_size=2).first() is None, "a later call of the trainer begins anew"


@pytest.mark.light
def test_a_report_is_checked_before_it_is_believed():
    assert RankFailure.decode(BOOM.encode().encode()) == BOOM
    long = RankFailure(1, "host-b", 7, "x" * 2 * LONGEST, 1)
    assert RankFailure.decode(long.encode().encode()).error == "x" * LONGEST
    for text in (b"[]", b'{"rank": 1}', BOOM.encode().replace("7", '"7"').encode(), b"\x80pickled"):
        with pytest.raises(ValueError):  # noqa: PT011
            RankFailure.decode(text)


@pytest.mark.light
@pytest.mark.parametrize(
    ("points", "seconds", "together"),
    [
        (["step 3", "step 3", "step 3"], at_most(100), True),
        (["step 3", "step 4", "step 3"], 0, False),
        (["step 3", "step 3"], 0, False),
    ],
    ids=["all at the same step", "at different steps", "not all"],
)
def test_ranks_work_together_after_a_failure_only_if_all_have_failed_at_the_same_step(points, seconds, together):
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        ranks = [FailureStore(store, 0, 3) for _ in points]
        decisions = list(threads.map(lambda rank, point: rank.fail_together(point, seconds), ranks, points))
    assert decisions == [together] * len(points)
    late = FailureStore(store, 0, 3)
    assert late.work_together() == together
    assert late.fail_together("step 3", at_most(100)) == together, "the decision is final"


# The end of a process that does not end by itself


@pytest.mark.light
@pytest.mark.parametrize(
    ("updates", "deadline"),
    [
        ([(10.0, False, False)], 10 + PATIENCE),
        ([(10.0, False, False), (12.0, True, False)], 12 + GRACE),
        ([(10.0, False, True)], None),
        ([(10.0, False, True), (500.0, True, True)], 500 + PATIENCE),
        ([(10.0, False, False), (29.0, True, False)], 10 + PATIENCE),
    ],
    ids=["failed", "left", "all save", "all have saved", "left late"],
)
def test_a_process_has_some_seconds_to_end_by_itself(updates, deadline):
    """While all ranks save a checkpoint together, there is no limit: a large checkpoint takes long."""
    countdown = Countdown(PATIENCE)
    for now, left, together in updates:
        countdown.update(now, left, together)
    assert countdown.deadline == deadline


@pytest.mark.light
def test_ranks_that_a_process_has_started_end_if_they_do_not_meet(monkeypatch):
    strategy = SpatialStrategy()
    launcher, rank = ScriptLauncher(LightningEnvironment(), 2, 1), subprocess.Popen(["sleep", "60"])
    launcher.procs = [rank]
    monkeypatch.setattr(strategy, "_launcher", launcher)
    monkeypatch.setattr(meeting, "ranks_meet", raising(torch.distributed.DistStoreError("1/2 clients joined.")))
    try:
        with pytest.raises(ConfigurationError, match=r"^the ranks have not met: 1/2 clients joined: look for"):
            strategy.setup_environment()
        assert rank.wait(30) == -signal.SIGKILL
    finally:
        rank.kill()


def raising(error):
    def function(*_):
        raise error

    return function


@pytest.mark.light
def test_a_process_that_does_not_end_by_itself_is_ended(monkeypatch):
    """One rank waits in a hook after its own exception, and the other rank in a collective for the first rank.

    The rank that has failed first ends first, because it has to print its exception.
    """
    monkeypatch.setattr(failure_watch, "PATIENCE", 0.0)
    monkeypatch.setattr(failure_watch, "GRACE", 1e6)
    monkeypatch.setattr(failure_watch, "POLL", 0.01)
    monkeypatch.setattr(failure_watch, "SERVING", 0.0)
    store, exception, ended = HashStore(), ValueError("boom"), queue.SimpleQueue()
    watches = [FailureWatch(FailureStore(store, 0, 2), rank, lambda *end: ended.put(end)) for rank in range(2)]
    watches[1].report(exception, BOOM)
    assert ended.get(timeout=at_most(100)) == (BOOM, exception)
    monkeypatch.setattr(failure_watch, "GRACE", 0.0)
    watches[0].close()
    watches[0] = FailureWatch(FailureStore(store, 0, 2), 0, lambda *end: ended.put(end))
    assert ended.get(timeout=at_most(100)) == (BOOM, None)
    for watch in watches:
        watch.close()


@pytest.mark.light
@pytest.mark.parametrize("failed", [0, 1, None])
def test_a_process_that_has_left_its_trainer_is_not_ended(failed, monkeypatch):
    """The program may handle the exception. Rank 0 leaves after all other ranks know of its failure or have left."""
    monkeypatch.setattr(failure_watch, "SERVING", at_most(100))
    ended, store = [], HashStore()
    watches = [FailureWatch(FailureStore(store, 0, 3), rank, lambda *_: ended.append(1)) for rank in range(3)]
    if failed is not None:
        watches[failed].report(ValueError("boom"), BOOM)
        watches[failed].close()
        assert FailureStore(store, 0, 3).has_left()
    if failed == 0:
        assert [watch.first for watch in watches] == [BOOM] * 3
    for watch in reversed(watches):
        watch.close()
    assert not ended
    assert FailureStore(store, 0, 3).all_have_finished()
    assert not any(thread.name == "failure watch" for thread in threading.enumerate())


# The callbacks that save a checkpoint


class Saver(OnExceptionCheckpoint):
    """A user's callback that counts its calls."""

    calls = 0

    def on_exception(self, trainer, *_):
        self.calls += 1


def fail_with(world_size, together, exception, in_rank=True):
    """Call `on_exception` of the callbacks of one rank, and return the saver."""
    saver = Saver(".")
    facts = SimpleNamespace(fail_together=lambda *_: together)
    trainer = quiet_trainer(callbacks=[saver, ModelCheckpoint()], enable_checkpointing=True)
    callback = failing.FailTogether()
    trainer.callbacks.insert(0, callback)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer), "world_size", world_size)
        patch.setattr(failing, "facts_of", lambda strategy: facts)
        if in_rank:
            callback.setup(trainer, trainer.lightning_module, "fit")
        for hooked in trainer.callbacks:
            hooked.on_exception(trainer, trainer.lightning_module, exception)
    return saver


@pytest.mark.parametrize(
    ("arguments", "saves"),
    [
        ((1, False, ValueError("boom")), 1),
        ((2, True, ValueError("boom")), 1),
        ((2, False, ValueError("boom")), 0),
        ((2, False, KeyboardInterrupt()), 0),
        ((2, False, failing.StoppedTogether(143)), 1),
        ((1, False, ValueError("boom"), False), 0),
    ],
    ids=["one rank", "all fail", "others train", "interrupted", "stopped together", "starter of the ranks"],
)
def test_a_checkpoint_is_saved_only_by_all_ranks_together(arguments, saves, capsys):
    saver = fail_with(*arguments)
    assert saver.calls == saves
    skipped = "Saver: no checkpoint is saved after the exception, because all ranks must save it together"
    assert capsys.readouterr().err.startswith(skipped) == (not saves and len(arguments) == 3)
    saver.on_exception(None)
    assert saver.calls == saves + 1, "a later run calls the hook again"


# Runs


class Fails(Callback):
    """Raises an exception at step 2, on some ranks.

    Args:
        ranks: The ranks.
        waits: Whether a hook waits for the other ranks after the exception.
        hosts: Whether each rank seems to be on its own machine.
    """

    def __init__(self, ranks, waits=False, hosts=False):
        self.ranks, self.waits, self.hosts = ranks, waits, hosts

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.hosts:
            socket.gethostname = lambda: f"host-{trainer.global_rank}"
        if batch_idx == 2 and trainer.global_rank in self.ranks:
            raise ConfigurationError("broken image a.png")

    def on_exception(self, trainer, *_):
        if self.waits and trainer.global_rank in self.ranks:
            trainer.strategy.barrier("a user's hook")


def train(strategy, fails):
    """Train on two ranks, which the launcher of the strategy has started or `srun` could have started.

    Print their exit codes.
    """

    def rank():
        module = ImageClassifier(PlainCNN(), num_classes=10)
        data = TensorDataset(torch.rand(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64))
        trainer = quiet_trainer(
            strategy(),
            2,
            callbacks=[
                fails,
                OnExceptionCheckpoint("."),
                ModelCheckpoint("kept", "best", save_on_exception=True),
            ],
            enable_checkpointing=True,
            max_epochs=1,
        )
        with ends_together(trainer, Interconnect()):
            trainer.fit(module, DataLoader(data, batch_size=8))

    if strategy is not SERVED:
        print("codes", run_started(2, rank))
        return
    try:
        rank()
    except ProcessRaisedException as error:
        print(str(error).strip(), "codes 1", sep="\n")


SERVED = partial(ParameterServerStrategy, start_method="fork")
STRATEGIES = {
    "ddp": lambda: "ddp",
    "ddp_balanced": BalancedDDPStrategy,
    "hybrid_pipeline": lambda: HybridPipelineStrategy(cuts=["2"]),
    "spatial": SpatialStrategy,
    "parameter_server": SERVED,
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_an_exception_on_one_rank_ends_all_ranks_and_its_own_line_is_last(strategy, monkeypatch):
    monkeypatch.setattr(failing, "TOGETHER", 0.0)  # The other rank waits in a collective, so it does not fail.
    code, output = run_forked(lambda: train(strategy, Fails([1])), timeout=100)
    *lines, last, codes = [line for line in output.splitlines() if line]
    assert code == 0, output
    assert codes.startswith("codes")
    assert "0" not in codes
    assert last.endswith("ConfigurationError: broken image a.png"), output
    assert output.count("Traceback") == 1, output
    assert sum("no checkpoint is saved after the exception" in line for line in lines) == 1, output
    assert not list(Path().rglob("*.ckpt"))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_an_exception_on_all_ranks_ends_them_after_they_have_saved_checkpoints(strategy, monkeypatch):
    monkeypatch.setattr(failing, "TOGETHER", at_most(60))
    code, output = run_forked(lambda: train(strategy, Fails([0, 1])), timeout=100)
    *lines, codes = [line for line in output.splitlines() if line]
    assert code == 0, output
    assert codes.startswith("codes")
    assert "0" not in codes
    # Only the rank that has failed first shows its exception. The other rank may still write other lines after that.
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    assert errors == ["cnnstrategies.errors.ConfigurationError: broken image a.png"], output
    assert output.count("Traceback") == 1, output
    assert {path.name for path in Path().rglob("*.ckpt")} == {"best.ckpt", "on_exception.ckpt"}, output
    assert torch.load("on_exception.ckpt", weights_only=True)["global_step"] == 2


def test_a_hook_that_waits_for_other_ranks_does_not_keep_a_failed_run_alive(monkeypatch):
    monkeypatch.setattr(failing, "TOGETHER", 0.0)
    monkeypatch.setattr(failure_watch, "PATIENCE", 0.5)
    monkeypatch.setattr(failure_watch, "GRACE", at_most(60))
    _, output = run_forked(lambda: train(lambda: "ddp", Fails([1], waits=True)), timeout=100)
    *_, last, codes = [line for line in output.splitlines() if line]
    assert last == "cnnstrategies: error: broken image a.png", output
    assert codes == "codes [2, 2]", output


def test_a_rank_on_another_machine_says_why_it_ends(monkeypatch):
    monkeypatch.setattr(failing, "TOGETHER", 0.0)
    _, output = run_forked(lambda: train(lambda: "ddp", Fails([1], hosts=True)), timeout=100)
    reason = "rank 0 on host-0 ends, because rank 1 on host-1 has failed:\n"
    assert f"\n{reason}cnnstrategies.errors.ConfigurationError: broken image a.png\n" in output, output
    assert output.count("Traceback") == 1, output
