"""Costs of a training step outside the network. They are counted: times on a shared machine would say little."""

import csv
import traceback
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import (
    EpochMetrics,
    FirstBatch,
    FromConfiguration,
    GracefulStop,
    SamplesPerSecond,
    SampleWeights,
    TrainingSummary,
)
from cnnstrategies.commands.run.trainer import all_callbacks
from cnnstrategies.commands.scaling.run import HostReads
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from tests.conftest import quiet_trainer

BATCHES, EVERY = 9, 4
OURS = (EpochMetrics, FirstBatch, FromConfiguration, GracefulStop, SamplesPerSecond, SampleWeights, TrainingSummary)


class EachStep(Callback):
    """Count the host reads and the formatted tracebacks of each step of an epoch."""

    def __init__(self, reads, formatted):
        self.counts = lambda: (reads.places.total(), len(formatted))
        self.steps, self.losses = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        now = self.counts()
        if batch_idx:
            self.steps.append(tuple(after - before for after, before in zip(now, self.before, strict=True)))
        self.before = now

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        # `numpy` does not count as a read from the device.
        self.losses.append((len(batch[1]), float(outputs["loss"].detach().numpy())))


def test_a_step_reads_nothing_formats_nothing_and_logs_its_loss_alone(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    model = ImageClassifier(SmallCNN(10, widths=[8]), 10, optimizer=lambda params: torch.optim.SGD(params, 0.05))
    logged, formatted, log = Counter(), [], model.log
    model.log = lambda name, *args, **options: logged.update([name]) or log(name, *args, **options)
    for module in (traceback, torch.cuda.traceback):
        monkeypatch.setattr(module, "format_stack", lambda *args: formatted.append(args) or [])
    each = EachStep(reads := HostReads(), formatted)
    trainer = quiet_trainer(
        callbacks=[*(kind() for kind in OURS), each],
        logger=CSVLogger("."),
        log_every_n_steps=EVERY,
        limit_train_batches=BATCHES,
        limit_val_batches=0,
        max_epochs=2,
    )
    with reads:
        trainer.fit(model, DigitsDataModule(batch_size=32))

    # In each epoch two steps are written to the log; such a step reads one number.
    assert sorted(each.steps) == [(0, 0)] * (2 * (BATCHES - 1) - 4) + [(1, 0)] * 4
    written = [step for step in range(2 * BATCHES) if (step + 1) % EVERY == 0]
    assert logged["train_loss"] == logged["train_acc"] == 2
    assert logged["train_loss_step"] == 2 * BATCHES  # Callbacks may read the loss after each step.
    with open("lightning_logs/version_0/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {int(row["step"]): float(row["train_loss_step"]) for row in rows if row["train_loss_step"]}
    means = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    assert steps == pytest.approx({step: each.losses[step][1] for step in written})
    epochs = each.losses[:BATCHES], each.losses[BATCHES:]
    assert means == pytest.approx([sum(n * loss for n, loss in epoch) / sum(n for n, _ in epoch) for epoch in epochs])


@pytest.mark.light
def test_the_progress_bar_is_drawn_a_few_times_a_second_unless_the_user_sets_its_rate():
    """Drawing the bar takes rank 0 two milliseconds each time, and the other ranks wait for rank 0."""
    shown = dict.fromkeys(("callbacks", "enable_progress_bar"))
    trainer = SimpleNamespace(**shown, logger=False, fast_dev_run=False, enable_checkpointing=False)
    options = {"predictions": None, "pictures": False, "stop": None, "guard": False, "slow_lines": True}
    config = SimpleNamespace(trainer=trainer, **options)

    def rates():
        return [callback.refresh_rate for callback in all_callbacks(config) if isinstance(callback, RichProgressBar)]

    (rate,) = rates()
    assert 0 < rate <= 5
    trainer.callbacks = [RichProgressBar(50)]
    assert rates() == [50]
