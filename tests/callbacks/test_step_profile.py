"""Each part of a step gets the time that was spent in it, and communication only what backward does not hide."""

import csv
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import forked
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import StepProfile, part_clock
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN


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
@forked
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


@forked
def test_communication_in_the_open_is_told_from_backward():
    times = profiled(classifier(), SlowLinks(0.04))
    # The thread that delays it may begin while backward is still closing the bucket.
    assert 30 <= times["communication"] <= times["communication_total"]
    assert times["communication_total"] >= 40
    assert times["backward"] < 40
    parts = set(times) - {"step", "communication_total"}
    assert times["step"] == pytest.approx(sum(times[part] for part in parts))


@forked
def test_communication_that_backward_hides_counts_as_backward():
    # Buckets of 100 bytes: the last layer's leaves before block1 computes.
    times = profiled(classifier(SlowFirstLayers), SlowLinks(0.04, bucket_cap_mb=0.0001))
    assert times["backward"] >= 60
    assert times["communication_total"] >= 60
    assert times["communication"] < 40


@forked
def test_accumulation_counts_an_all_reduce_once():
    times = profiled(classifier(), SlowLinks(0.08), accumulate_grad_batches=4)
    # Two of the eight profiled batches send.
    assert times["communication_total"] >= 20
    assert 15 <= times["communication"] < 40


@forked
def test_a_run_that_is_too_short_says_so(capsys):
    fit(StepProfile(skip_first=50), model=classifier(), max_steps=3)
    assert "StepProfile: fit ended after 3 steps; skip_first=50 left none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [({"skip_first": 0}, "skip_first=0: .* 10 is usual"), ({"steps": 0}, "steps=0: .* 50 is usual")],
)
@forked
def test_refusals_name_the_value_and_the_remedy(options, words):
    with pytest.raises(ValueError, match=words):
        StepProfile(**options)
