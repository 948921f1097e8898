"""Each part of a step gets the time that was spent in it, and communication only what backward does not hide."""

import contextlib
import csv
import itertools
import json
import multiprocessing
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import StepProfile, step_parts, step_profile
from cnnstrategies.callbacks.step_parts import PartClock
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.worker.connections import Counters
from cnnstrategies.pipeline import step as step_module
from cnnstrategies.pipeline.step import Step
from cnnstrategies.strategies import HybridPipelineStrategy

WIDTH = 16  # characters of a part's name


def fit(*callbacks, model, data=None, **options):
    trainer = Trainer(
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "limit_val_batches": 1, **options},
    )
    trainer.fit(model, data or DigitsDataModule(batch_size=32))
    return trainer


def classifier(cls=ImageClassifier):
    seed_everything(1, verbose=False)
    return cls(SmallCNN(10, widths=[8]), 10, optimizer=lambda params: torch.optim.SGD(params, 0.05))


@pytest.fixture
def spend(monkeypatch):
    """A clock that goes forward only when told to: ``spend(seconds)``."""
    now = [0.0]
    monkeypatch.setattr(step_parts, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds):
        now[0] += seconds

    return spend


SPENT = {"data": 0.005, "transfer": 0.003, "forward": 0.011, "backward": 0.007, "optimizer": 0.004, "other": 0.002}


class SpendingCallback(Callback):
    """Spends time where no step is: in the pauses of the profile, too."""

    def __init__(self, spend):
        self.spend = spend

    def on_train_batch_start(self, *args):
        self.spend(SPENT["other"] / 2)

    def on_train_batch_end(self, *args):
        self.spend(SPENT["other"] / 2)

    def on_validation_start(self, *args):
        self.spend(100)

    on_validation_end = on_train_epoch_end = on_validation_start


def spending(spend):
    class Classifier(ImageClassifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            spend(SPENT["transfer"])
            return super().on_after_batch_transfer(batch, dataloader_idx)

        def training_step(self, batch, batch_idx):
            spend(SPENT["forward"])
            return super().training_step(batch, batch_idx)

        def backward(self, loss):
            spend(SPENT["backward"])
            loss.backward()

        def on_before_optimizer_step(self, optimizer):
            spend(SPENT["optimizer"])

    class Data(DigitsDataModule):
        def train_dataloader(self):
            loader = super().train_dataloader()
            transform = loader.dataset.transform

            def slow(images):
                spend(SPENT["data"])
                return transform(images)

            loader.dataset.transform = slow
            return loader

    return classifier(Classifier), Data(batch_size=32)


@pytest.mark.parametrize(
    ("steps", "validate_every", "measured"), [(None, 8, 22), (9, 3, 9)], ids=["to the end", "validation in the epoch"]
)
def test_each_part_gets_its_time_and_the_pauses_get_none(spend, capsys, steps, validate_every, measured):
    model, data = spending(spend)
    profile, mine = StepProfile(2, steps), SimpleProfiler()
    trainer = fit(
        profile,
        SpendingCallback(spend),
        model=model,
        data=data,
        max_epochs=3,
        limit_train_batches=8,
        val_check_interval=validate_every,
        logger=CSVLogger("."),
        profiler=mine,
    )
    printed = capsys.readouterr().out
    assert f"Where {measured} training steps spent" in printed
    # What follows the last batch before a pause is not counted, so `other` may lack its second half there.
    assert profile.milliseconds.pop("other") == pytest.approx(1000 * SPENT["other"], rel=0.2)
    step = profile.milliseconds.pop("step")
    expected = {part: 1000 * seconds for part, seconds in SPENT.items() if part != "other"}
    assert profile.milliseconds == pytest.approx(expected)
    assert step == pytest.approx(1000 * sum(SPENT.values()), rel=0.02)
    assert f" {11 / step:.0%} │ network, loss, metrics" in printed
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["profile/forward_ms"]) == pytest.approx(11)
    # The user's own profiler saw everything and is back.
    assert trainer.profiler is mine
    assert len(mine.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 24


class Waiting(SingleDeviceStrategy):
    """Counts waiting as a worker of parameter servers does."""

    counters = None

    def on_train_start(self):
        self.counters = Counters()


def test_waiting_for_servers_is_told_from_the_forward(spend):
    class Worker(ImageClassifier):
        def training_step(self, batch, batch_idx):
            spend(SPENT["forward"] + 0.006)
            self.trainer.strategy.counters.seconds_waited += 0.006
            return super().training_step(batch, batch_idx)

        def on_validation_start(self):
            self.trainer.strategy.counters.seconds_waited += 100

    profile = StepProfile(2)
    options = {"max_epochs": 2, "limit_train_batches": 4, "num_sanity_val_steps": 0, "logger": False}
    fit(profile, model=classifier(Worker), strategy=Waiting("cpu"), **options)
    assert profile.milliseconds["wait"] == pytest.approx(6)
    assert profile.milliseconds["forward"] == pytest.approx(11)
    assert profile.milliseconds["step"] == pytest.approx(17)


class Ranks:
    """A clock that forked ranks share. It goes forward when one of them spends time and the others wait for that one.

    So it is the same on any machine who waited where, and for how long.
    """

    def __init__(self, monkeypatch):
        self._now = multiprocessing.Value("d", 0.0)
        self._parts = multiprocessing.Array("u", 3 * WIDTH)
        self._lock = multiprocessing.Lock()  # A rank that goes to another part reads the clock and says so at once.
        self._profiling = False
        clock = lambda: self._now.value  # noqa: E731
        monkeypatch.setattr(step_parts, "time", SimpleNamespace(perf_counter=clock))
        monkeypatch.setattr(step_module, "time", SimpleNamespace(time=clock))
        for name in ("run", "begin", "end", "pause"):
            monkeypatch.setattr(PartClock, name, self._telling(getattr(PartClock, name)))
        timed = Step.timed

        @contextlib.contextmanager
        def telling(step, kind, microbatch):
            with timed(step, kind, microbatch):
                with self._lock:
                    self._tell(kind)
                yield
                with self._lock:
                    self._tell("metrics")

        monkeypatch.setattr(Step, "timed", telling)

    def _telling(self, method):
        def tell(clock, *args):
            with self._lock:
                method(clock, *args)
                self._profiling = clock.running
                self._tell((clock.open_parts or ["other"])[-1])

        return tell

    def _tell(self, part):
        start = WIDTH * dist.get_rank()
        self._parts[start : start + WIDTH] = part.ljust(WIDTH)

    def _part_of(self, rank):
        return "".join(self._parts[WIDTH * rank : WIDTH * (rank + 1)]).strip()

    def spend(self, seconds, others):
        """Let time pass, in the profiled steps once each of the other ranks is in the part that is named."""
        while True:
            with self._lock:
                if not self._profiling or all(self._part_of(rank) == part for rank, part in others.items()):
                    self._now.value += seconds
                    return
            time.sleep(0.001)


class Slow(nn.Tanh):
    """Spends time in forward and in backward, on one rank.

    Args:
        ranks: Their clock.
        rank: Which one.
        others: Where the other ranks wait meanwhile: one after the other for each time of a step.
        forward: Seconds.
        backward: Seconds.
    """

    def __init__(self, ranks, rank, others, forward=0.0, backward=0.0):
        super().__init__()
        self.ranks, self.rank, self.others = ranks, rank, itertools.cycle(others)
        self.seconds = forward, backward
        self.register_full_backward_pre_hook(lambda *_: self.spend(1))

    def spend(self, which):
        if dist.get_rank() == self.rank and self.seconds[which]:
            self.ranks.spend(self.seconds[which], next(self.others))

    def forward(self, input):
        if torch.is_grad_enabled():  # Not when cuts are tried.
            self.spend(0)
        return super().forward(input)


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


class Untimed(Callback):
    """Outside the profiled steps the engine times nothing."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        profiling = 2 <= trainer.global_step < 6
        assert bool(trainer.strategy.pipeline.watchers) == profiling, trainer.global_step


def stages_of(ranks, replicas, slow_first=None, slow_last=None, step=0.0):
    """What each stage of a pipeline of two did in a step of 4 microbatches, from what was logged."""

    class Classifier(ImageClassifier):
        def training_step(self, batch, batch_idx):
            if dist.get_rank() == 0:
                ranks.spend(step, {})
            return super().training_step(batch, batch_idx)

    first = nn.Sequential(nn.Conv2d(1, 4, 3), slow_first or nn.Tanh())
    last = nn.Sequential(nn.Conv2d(4, 4, 3), slow_last or nn.Tanh(), nn.Flatten(), nn.Linear(64, 10))
    strategy = HybridPipelineStrategy(replicas=replicas, cuts=["0"], microbatches=4, start_method="fork")
    profile = StepProfile(skip_first=2, steps=4, timeline=2)
    model = Classifier(nn.Sequential(first, last), 10)
    fit(profile, Untimed(), model=model, strategy=strategy, devices=sum(replicas), max_steps=8, logger=CSVLogger("."))
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    found = [{}, {}]
    for name, value in row.items():
        if name.startswith("profile/stage_"):
            _, stage, part = name.split("/")
            found[int(stage[6:])][part[:-3]] = float(value)
    events = json.loads(Path("lightning_logs/version_0/timeline.json").read_text())["traceEvents"]
    for rank in range(sum(replicas)):
        tasks = sorted(
            one["name"] for one in events if one["pid"] == rank and one.get("cat") in ("forward", "backward")
        )
        own = range(rank, 4, 2) if replicas == [2, 1] and rank < 2 else range(4)
        assert tasks == sorted(2 * [f"{kind} {microbatch}" for kind in ("forward", "backward") for microbatch in own])
    for times in found:
        assert times["step"] == pytest.approx(sum(value for part, value in times.items() if part != "step"))
    return found


def test_a_slow_stage_computes_and_the_other_one_waits_for_it(ranks, capfd):
    slow = Slow(ranks, 1, [{0: "receive"}], forward=0.02, backward=0.06)
    first, last = stages_of(ranks, [1, 1], slow_last=slow, step=0.005)
    assert last["forward"] == pytest.approx(4 * 20)
    # The first stage may begin its next training_step while the last one is still in this backward, or waits already.
    assert last["backward"] == pytest.approx(4 * 60, abs=5)
    assert last["receive"] <= 5
    expected = {"receive": 4 * (20 + 60), "metrics": 5, "step": 4 * (20 + 60) + 5}
    assert first == pytest.approx(dict.fromkeys(first, 0) | expected)
    printed = capfd.readouterr().out
    assert "┃ stage 0 ┃ stage 1 ┃ share ┃" in printed
    waits = [int(share) for share in re.search(r"stage 0 (\d+)%, stage 1 (\d+)%\. The others", printed).groups()]
    assert waits[0] == round(100 * 320 / 325)
    assert waits[1] <= round(100 * 5 / 325), "for training_step of the first stage, at most"


def test_a_replica_that_waits_for_the_others_gradients_reduces(ranks):
    # The last stage's outputs leave with its last backward; then Lightning's own broadcast waits.
    slow = Slow(ranks, 0, [{1: "reduce", 2: "gather"}, {1: "reduce", 2: "other"}], backward=0.1)
    first, last = stages_of(ranks, [2, 1], slow_first=slow)
    # Means of the replica that takes 200 ms for its two backwards and of the one that waits for it.
    assert first["backward"] == pytest.approx(100)
    assert first["reduce"] == pytest.approx(100)
    assert last["reduce"] == last["receive"] == 0
    assert last["gather"] == pytest.approx(100)


def reduced(monkeypatch, spend, total, hidden, **options):
    """The profile of a run whose backward takes 100 ms each time, of which DDP says what all-reduce took."""
    monkeypatch.setattr(step_profile, "communication_seconds", lambda model: (total, hidden))

    class Classifier(ImageClassifier):
        def backward(self, loss):
            spend(0.1)
            loss.backward()

    profile = StepProfile(2, 8)
    options = {"limit_val_batches": 0, "logger": False, "max_epochs": 1, "limit_train_batches": 12, **options}
    fit(profile, model=classifier(Classifier), strategy=DDPStrategy(), **options)
    return profile.milliseconds


def test_communication_in_the_open_is_told_from_the_hidden(monkeypatch, spend):
    times = reduced(monkeypatch, spend, total=0.04, hidden=0.03)
    assert times["communication_total"] == pytest.approx(40)
    assert times["communication"] == pytest.approx(10)
    assert times["backward"] == pytest.approx(90)
    assert times["step"] == pytest.approx(100)


def test_accumulation_counts_an_all_reduce_once(monkeypatch, spend):
    times = reduced(monkeypatch, spend, total=0.08, hidden=0.0, accumulate_grad_batches=4)
    # Two of the eight profiled batches send.
    assert times["communication_total"] == times["communication"] == pytest.approx(80 / 4)
    assert times["backward"] == pytest.approx(100 - 80 / 4)


def test_a_second_fit_is_profiled_by_itself_and_a_short_one_told(spend, capsys):
    model, data = spending(spend)
    profile = StepProfile(2, 3)
    trainer = fit(profile, model=model, data=data, max_epochs=1, limit_train_batches=8, logger=False)
    first = dict(profile.milliseconds)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    assert profile.milliseconds == pytest.approx(first)
    profile.skip_first = 100
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, data)
    assert profile.milliseconds == {}
    assert "StepProfile: fit ended after 8 steps; skip_first=100 left none" in capsys.readouterr().out


@pytest.mark.light
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip_first": 0}, "skip_first=0: .* 10 is usual"),
        ({"steps": 0}, "steps=0: .* 50 is usual"),
        ({"timeline": -1}, "timeline=-1 is negative"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(options, words):
    with pytest.raises(ConfigurationError, match=words):
        StepProfile(**options)


def test_a_timeline_is_a_pipelines():
    with pytest.raises(ConfigurationError, match=r"timeline=1\) draws a pipeline, .* use strategy hybrid_pipeline"):
        fit(StepProfile(timeline=1), model=classifier(), max_steps=3)
