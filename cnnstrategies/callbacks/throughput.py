"""Callback that measures the training speed of all ranks in samples per second."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.models.samples import count_samples


class SamplesPerSecond(Callback):
    """Callback that logs ``samples_per_s`` for each training epoch: samples of all ranks divided by the epoch's time.

    The time does not include validation, checkpoints and the first step of the run, which builds caches and
    connections. Lightning's ThroughputMonitor is not used, because the user would have to give it a function that
    returns the batch size, and because it measures single steps and not epochs.

    Attributes:
        mean: Samples per second, as a mean over all epochs of this run; None before the end of the first epoch.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self._samples = 0
        self._seconds = 0.0
        self._epoch_samples = 0
        self._epoch_seconds = 0.0
        self._mark: float | None = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch_samples, self._epoch_seconds = 0, 0.0
        # The run's first step also builds caches and connections, so the measurement starts after this step.
        self._mark = time.monotonic() if self._samples else None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The CPU queues steps faster than a GPU runs them, so the GPU is synchronised at the start and at the end of
        # the measured time.
        if trainer.strategy.root_device.type == "cuda" and (self._mark is None or trainer.is_last_batch):
            torch.cuda.synchronize()
        now = time.monotonic()
        if self._mark is not None:
            self._epoch_seconds += now - self._mark
            self._epoch_samples += count_samples(batch)
        self._mark = now

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A validation within the epoch must not count, so the next step's time is measured from here.
        if self._mark is not None:
            self._mark = time.monotonic()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counted = torch.tensor(float(self._epoch_samples), device=trainer.strategy.root_device)
        samples = float(trainer.strategy.reduce(counted, reduce_op="sum"))
        if self._epoch_seconds == 0:
            return
        self._samples += int(samples)
        self._seconds += self._epoch_seconds
        self.mean = self._samples / self._seconds
        pl_module.log("samples_per_s", samples / self._epoch_seconds, sync_dist=True)
