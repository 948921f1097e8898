"""The profile gives each part of a step its time, and counts communication only where backward does not hide it."""

import csv
import os
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import StepProfile, step_parts
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.recording import clock
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.protocol import StrategyFacts
from tests.conftest import quiet_trainer


def fit(*callbacks, model, **options):
    trainer = quiet_trainer(callbacks=list(callbacks), **{"limit_val_batches": 1, **options})
    trainer.fit(model, DigitsDataModule(batch_size=32))
    return trainer


def classifier():
    seed_everything(1, verbose=False)
    return ImageClassifier(SmallCNN(10, widths=[8]), 10, optimizer=lambda params: torch.optim.SGD(params, 0.05))


SPENT = {"data": 0.005, "transfer": 0.003, "forward": 0.011, "backward": 0.007, "optimizer": 0.004, "other": 0.002}


@pytest.fixture
def spend(monkeypatch):
    """Replace the profile's clock, and return ``spend(seconds)``, which moves the clock forward.

    The parts of a step take the times in SPENT, and nothing else takes time.
    """
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds):
        now[0] += seconds

    def slow(kind, name, part):
        method = getattr(kind, name)

        def slower(*args):
            spend(SPENT[part])
            return method(*args)

        monkeypatch.setattr(kind, name, slower)

    slow(_SingleProcessDataLoaderIter, "_next_data", "data")
    slow(ImageClassifier, "on_after_batch_transfer", "transfer")
    slow(ImageClassifier, "training_step", "forward")
    slow(ImageClassifier, "backward", "backward")
    slow(ImageClassifier, "on_before_optimizer_step", "optimizer")
    return spend


class SpendingCallback(Callback):
    """Spends time between the parts of a step, and in the pauses of the profile, where no step runs."""

    def __init__(self, spend):
        self.spend = spend

    def on_train_batch_start(self, *args):
        self.spend(SPENT["other"] / 2)

    def on_train_batch_end(self, *args):
        self.spend(SPENT["other"] / 2)

    def on_validation_start(self, *args):
        self.spend(100)

    on_validation_end = on_train_epoch_end = on_validation_start


@pytest.mark.parametrize(
    ("steps", "validate_every", "measured"), [(None, 8, 22), (9, 3, 9)], ids=["to the end", "validation in the epoch"]
)
def test_each_part_gets_its_time_and_the_pauses_get_none(spend, capsys, steps, validate_every, measured):
    model, profile, mine = classifier(), StepProfile(2, steps), SimpleProfiler()
    options = {"max_epochs": 3, "limit_train_batches": 8, "val_check_interval": validate_every, "profiler": mine}
    trainer = fit(profile, SpendingCallback(spend), model=model, logger=CSVLogger("."), **options)
    printed = capsys.readouterr().out
    assert f"Time of {measured} training steps by part" in printed
    times = dict(profile.milliseconds)
    # Time after the last batch before a pause is not counted, so `other` may miss its second half for this batch.
    assert times.pop("other") == pytest.approx(1000 * SPENT["other"], rel=0.2)
    step = times.pop("step")
    assert times == pytest.approx({part: 1000 * seconds for part, seconds in SPENT.items() if part != "other"})
    assert step == pytest.approx(1000 * sum(SPENT.values()), rel=0.02)
    assert f" {11 / step:.0%} │ network, loss, metrics" in printed
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["profile/forward_ms"]) == pytest.approx(11)
    # The user's own profiler has measured all steps and is the trainer's profiler again.
    assert trainer.profiler is mine
    assert len(mine.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 24

    # A second fit has a profile of its own. A fit that is too short for a profile gets a message.
    profile.skip_first = 100
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, DigitsDataModule(batch_size=32))
    assert profile.milliseconds == {}
    assert "fit ended after 8 steps, and skip_first=100 left no step to profile" in capsys.readouterr().out


class Waiting(StrategyFacts, SingleDeviceStrategy):
    """A strategy that counts its waiting time as a parameter server's worker does."""

    step_kind = "worker"
    traffic = None

    def on_train_start(self):
        self.traffic = Counters()

    def training_step(self, *args):
        self.spend(0.006)
        self.traffic.seconds_waited += 0.006
        return super().training_step(*args)

    def validation_step(self, *args):
        self.traffic.seconds_waited += 100
        return super().validation_step(*args)


def test_waiting_for_servers_is_separated_from_the_forward(spend):
    strategy, profile = Waiting("cpu"), StepProfile(2)
    strategy.spend = spend
    fit(profile, model=classifier(), strategy=strategy, max_epochs=2, limit_train_batches=4)
    times = profile.milliseconds
    assert [times["wait"], times["forward"], times["step"]] == pytest.approx([6, 11, 6 + 30])


class Slow(nn.Tanh):
    """A layer that sleeps in forward and in backward, on one rank.

    Args:
        rank: Rank that sleeps.
        forward: Seconds in the forward of each microbatch.
        backward: Seconds in the backward of each microbatch.
    """

    def __init__(self, rank, forward, backward):
        super().__init__()
        self.rank, self.forward_seconds, self.backward_seconds = rank, forward, backward
        self.register_full_backward_pre_hook(lambda *_: self.sleep(self.backward_seconds))

    def sleep(self, seconds):
        # In a step, the default process group of a pipeline's rank has one process.
        if int(os.environ["LOCAL_RANK"]) == self.rank:
            time.sleep(seconds)

    def forward(self, input):
        if torch.is_grad_enabled():  # The strategy tries cuts without gradients; no sleep then.
            self.sleep(self.forward_seconds)
        return super().forward(input)


class Untimed(Callback):
    """Checks that the pipeline is timed only in profiled steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        profiling = 2 <= trainer.global_step < 4
        assert bool(trainer.strategy.pipeline.watchers) == profiling, trainer.global_step


def stages_of(replicas, slow_first, slow_last):
    """Return the logged times of both stages of a pipeline, in ms by part, for a step of 4 microbatches."""
    first = nn.Sequential(nn.Conv2d(1, 4, 3), slow_first)
    last = nn.Sequential(nn.Conv2d(4, 4, 3), slow_last, nn.Flatten(), nn.Linear(64, 10))
    strategy = HybridPipelineStrategy(replicas=replicas, cuts=["0"], microbatches=4, start_method="fork")
    profile = StepProfile(skip_first=2, steps=2)
    model = ImageClassifier(nn.Sequential(first, last), 10)
    options = {"devices": sum(replicas), "max_steps": 5, "logger": CSVLogger(".")}
    fit(profile, Untimed(), model=model, strategy=strategy, **options)
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    measured = [{}, {}]
    for name, value in row.items():
        if name.startswith("profile/stage_"):
            _, stage, part = name.split("/")
            measured[int(stage[6:])][part[:-3]] = float(value)
    for times in measured:
        assert times["step"] == pytest.approx(sum(value for part, value in times.items() if part != "step"))
    return measured


def test_a_slow_stage_computes_and_the_other_one_waits_for_it(capfd):
    """The test does not depend on the machine's speed: no step is faster than the stage that sleeps."""
    first, last = stages_of([1, 1], nn.Tanh(), Slow(1, forward=0.03, backward=0.06))
    assert last["forward"] >= 4 * 30
    assert last["backward"] >= 4 * 60
    assert last["receive"] < last["forward"]
    assert first["receive"] > first["step"] / 2 > first["forward"] + first["backward"]
    printed = capfd.readouterr().out
    assert "┃ stage 0 ┃ stage 1 ┃ share ┃" in printed
    assert f"Waiting for other ranks: stage 0 {waiting(first):.0%}, stage 1 {waiting(last):.0%}. The stage" in printed


def waiting(times):
    return sum(times[part] for part in ("share", "receive", "send", "reduce", "gather")) / times["step"]


def test_a_replica_that_waits_for_the_others_gradients_reduces():
    first, last = stages_of([2, 1], Slow(0, forward=0.0, backward=0.1), nn.Tanh())
    # These are means over a replica that takes 200 ms for its two backwards and a replica that waits for it.
    assert first["backward"] >= 100
    assert first["reduce"] + first["gather"] > 50, "it waits for gradients, or for their names"
    assert last["reduce"] < 50
    assert last["gather"] + last["other"] > 50, "it waits for outputs of all ranks, or for a callback's broadcast"


def reduced(monkeypatch, total, hidden, **options):
    """Return times of a profiled DDP run, in ms; `total` and `hidden` are the seconds that DDP reports."""
    monkeypatch.setattr(step_parts, "communication_seconds", lambda model: (total, hidden))
    profile = StepProfile(2, 8)
    options = {"limit_val_batches": 0, "max_epochs": 1, "limit_train_batches": 12, **options}
    fit(profile, model=classifier(), strategy=DDPStrategy(), **options)
    return [profile.milliseconds[part] for part in ("communication_total", "communication", "backward")]


def test_visible_communication_is_separated_from_hidden_communication(monkeypatch, spend):
    assert reduced(monkeypatch, total=0.004, hidden=0.003) == pytest.approx([4, 1, 7 - 1])
    # Only two of the eight profiled batches reduce gradients.
    measured = reduced(monkeypatch, total=0.008, hidden=0.0, accumulate_grad_batches=4)
    assert measured == pytest.approx([8 / 4, 8 / 4, 7 - 8 / 4])


def test_refusals_name_the_value_and_the_remedy():
    for options, words in (
        ({"skip_first": 0}, "skip_first=0: .* for example 10"),
        ({"steps": 0}, "steps=0: .* for example 50"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            StepProfile(**options)
