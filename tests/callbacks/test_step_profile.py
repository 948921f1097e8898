"""Each part of a step gets the time that was spent in it, and communication only what backward does not hide."""

import csv
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import StepProfile, part_clock
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.paramserver.counters import Counters
from cnnstrategies.strategies import HybridPipelineStrategy


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
    monkeypatch.setattr(part_clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))

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


def test_waiting_for_servers_is_told_from_the_forward_in_which_it_falls(spend):
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


class Slow(nn.Tanh):
    """Takes some time more, on one rank or on all that have it."""

    def __init__(self, forward=0.0, backward=0.0, rank=None):
        super().__init__()
        self.seconds = forward, backward
        self.rank = rank
        self.register_full_backward_pre_hook(lambda *_: self.sleep(1))

    def sleep(self, which):
        if self.rank in (None, dist.get_rank()):
            time.sleep(self.seconds[which])

    def forward(self, input):
        if torch.is_grad_enabled():  # Not when cuts are tried.
            self.sleep(0)
        return super().forward(input)


class Untimed(Callback):
    """Outside the profiled steps the engine times nothing."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        profiling = 2 <= trainer.global_step < 6
        assert bool(trainer.strategy.pipeline.executor.watchers) == profiling, trainer.global_step


def stages_of(replicas, slow_first=None, slow_last=None):
    """What each stage of a pipeline of two did in a step of 4 microbatches, from what was logged."""
    first = nn.Sequential(nn.Conv2d(1, 4, 3), slow_first or nn.Tanh())
    last = nn.Sequential(nn.Conv2d(4, 4, 3), slow_last or nn.Tanh(), nn.Flatten(), nn.Linear(64, 10))
    strategy = HybridPipelineStrategy(replicas=replicas, cuts=["0"], microbatches=4, start_method="fork")
    profile = StepProfile(skip_first=2, steps=4)
    model = ImageClassifier(nn.Sequential(first, last), 10)
    fit(profile, Untimed(), model=model, strategy=strategy, devices=sum(replicas), max_steps=8, logger=CSVLogger("."))
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    found = [{}, {}]
    for name, value in row.items():
        if name.startswith("profile/stage_"):
            _, stage, part = name.split("/")
            found[int(stage[6:])][part[:-3]] = float(value)
    for times in found:
        assert times["metrics"] > 0
        assert times["step"] == pytest.approx(sum(value for part, value in times.items() if part != "step"))
    return found


def test_a_slow_stage_computes_and_the_other_one_waits_for_it(capfd):
    first, last = stages_of([1, 1], slow_last=Slow(forward=0.02, backward=0.06))
    computing = last["forward"] + last["backward"]
    assert last["forward"] >= 80
    assert last["backward"] > 2 * last["forward"]
    assert computing > 0.6 * last["step"]
    assert first["forward"] + first["backward"] < 0.3 * computing
    assert first["receive"] > 0.6 * computing
    assert last["receive"] < 0.3 * computing
    assert first["step"] == pytest.approx(last["step"], rel=0.1)
    printed = capfd.readouterr().out
    assert "┃ stage 0 ┃ stage 1 ┃ share ┃" in printed
    waits = [int(share) for share in re.search(r"stage 0 (\d+)%, stage 1 (\d+)%\. The others", printed).groups()]
    assert waits[0] > 60 > 40 > waits[1]


def test_a_replica_that_waits_for_the_other_ones_gradients_reduces():
    first, last = stages_of([2, 1], slow_first=Slow(backward=0.1, rank=0))
    # Mean of the replica that takes 200 ms for its two backwards and of the one that waits for the last of them.
    assert 100 <= first["backward"] < 0.7 * first["step"]
    assert first["reduce"] > 0.2 * first["step"]
    assert last["reduce"] < 0.3 * first["reduce"]
    # Its outputs leave with the last backward; then Lightning's own broadcast, whether a signal has come, waits.
    assert last["gather"] > 0.2 * last["step"]
    assert last["gather"] + last["other"] > 0.6 * last["step"]


class SlowLinks(DDPStrategy):
    """DDP in which the all-reduce of the gradients that are ready first (the last layers') takes some time more."""

    def __init__(self, seconds, **kwargs):
        super().__init__(start_method="fork", **kwargs)
        self.seconds = seconds

    def configure_ddp(self):
        super().configure_ddp()

        def hook(state, bucket):
            sent = allreduce_hook(state, bucket)
            if bucket.index() > 0:
                return sent
            late = torch.futures.Future()

            def arrive():
                result = sent.wait()
                time.sleep(self.seconds)
                late.set_result(result)

            # Not `sent.then`: on the rank that is last it would run at once, within backward.
            threading.Thread(target=arrive).start()
            return late

        self.model.register_comm_hook(None, hook)


class SlowFirstLayers(ImageClassifier):
    """Spends 60 ms of backward after the gradients of the last layer are there."""

    def on_fit_start(self):
        self.network.block1.register_full_backward_pre_hook(lambda *_: time.sleep(0.06))


def profiled(model, strategy, **options):
    """The profile of a run on two processes, from what was logged."""
    fit(
        StepProfile(12, 8),  # Without being asked to, DDP times its first ten steps only.
        model=model,
        strategy=strategy,
        devices=2,
        max_steps=20 // options.get("accumulate_grad_batches", 1),
        limit_val_batches=0,
        logger=CSVLogger("."),
        **options,
    )
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    return {name[8:-3]: float(value) for name, value in row.items() if name.startswith("profile/") and value}


def test_communication_in_the_open_is_told_from_backward():
    times = profiled(classifier(), SlowLinks(0.04))
    # The thread that delays it may begin while backward is still closing the bucket.
    assert 30 <= times["communication"] <= times["communication_total"]
    assert times["communication_total"] >= 40
    assert times["backward"] < 40
    parts = set(times) - {"step", "communication_total"}
    assert times["step"] == pytest.approx(sum(times[part] for part in parts))


def test_communication_that_backward_hides_counts_as_backward():
    # Buckets of 100 bytes: the last layer's leaves before block1 computes.
    times = profiled(classifier(SlowFirstLayers), SlowLinks(0.04, bucket_cap_mb=0.0001))
    assert times["backward"] >= 60
    assert times["communication_total"] >= 60
    assert times["communication"] < 40


def test_accumulation_counts_an_all_reduce_once():
    times = profiled(classifier(), SlowLinks(0.08), accumulate_grad_batches=4)
    # Two of the six profiled batches send: a third of 80 ms and of what a busy machine adds; all would be over 80.
    assert times["communication_total"] >= 20
    assert 15 <= times["communication"] < 65


def test_a_second_fit_is_profiled_by_itself(spend):
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


def test_a_run_that_is_too_short_says_so(capsys):
    fit(StepProfile(skip_first=50), model=classifier(), max_steps=3)
    assert "StepProfile: fit ended after 3 steps; skip_first=50 left none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [({"skip_first": 0}, "skip_first=0: .* 10 is usual"), ({"steps": 0}, "steps=0: .* 50 is usual")],
)
def test_refusals_name_the_value_and_the_remedy(options, words):
    with pytest.raises(ValueError, match=words):
        StepProfile(**options)
