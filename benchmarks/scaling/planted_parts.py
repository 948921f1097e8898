"""A module, data and callbacks with causes of slow training, as users write them without noticing; see planted.py."""

import copy
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

UNEVEN = 0.004  # Seconds of the work on a sample that varies from batch to batch.


class Net(LightningModule):
    """A small convolutional network with batch normalisation and a training step of its own.

    Args:
        meets: How the ranks meet in each step: by a ``barrier``, or by a ``log`` with ``sync_dist``.
        uneven: Whether a part of the work takes longer on one rank before the ranks meet, and on the other rank
            afterwards, in turns. The ranks would have the same work in each step if they did not meet.
        slow_rank: Rank that takes additional time for each sample; -1 for none.
        fixed: Seconds that a step takes whatever its number of samples.
        buffers: Megabytes of additional buffers.
    """

    def __init__(
        self, meets: str = "", uneven: bool = False, slow_rank: int = -1, fixed: float = 0.0, buffers: int = 0
    ) -> None:
        super().__init__()
        self.meets, self.uneven, self.slow_rank, self.fixed = meets, uneven, slow_rank, fixed
        widths = [3, 32, 64, 128]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        ]
        self.network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
        self.register_buffer("queue", torch.zeros(buffers * 250_000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        images, targets = batch
        loss = nn.functional.cross_entropy(self.network(images), targets)
        time.sleep(self.fixed + 0.008 * len(images) * (self.slow_rank == self.global_rank))
        early = (batch_idx + self.global_rank) % 2
        uneven = UNEVEN * len(images) * self.uneven
        time.sleep(uneven * early)
        if self.meets == "barrier":
            self.trainer.strategy.barrier()
        self.log("train_loss", loss, sync_dist=self.meets == "log")
        time.sleep(uneven * (1 - early))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The loss, logged."""
        images, targets = batch
        self.log("val_loss", nn.functional.cross_entropy(self.network(images), targets))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


class Samples(Dataset[Any]):
    """Random images, each after what is done to it, some milliseconds long."""

    def __init__(self, count: int, cost: str) -> None:
        self.count, self.cost = count, cost
        self.images = torch.rand(64, 3, 64, 64)
        self.noise = torch.rand(60_000)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index % 64]
        if self.cost == "waits":
            time.sleep(0.008)
        if self.cost == "computes":  # In few calls, during which others have the interpreter's lock.
            image = image + 0 * self.noise.sort().values[0]
        if self.cost == "holds the lock":
            sum(number * number for number in range(60_000))
        return image, index % 10


class Data(LightningDataModule):
    """A data module with loaders of these images.

    Args:
        batch_size: Number of samples of a rank's batch.
        num_workers: Number of worker processes of the training loader.
        cost: What loading a sample takes: it ``waits``, ``computes`` or ``holds the lock``.
        only: The only rank on which loading a sample takes time; -1 for all ranks.
        validation: Number of samples for validation.
    """

    def __init__(
        self, batch_size: int = 16, num_workers: int = 0, cost: str = "", only: int = -1, validation: int = 64
    ) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.cost, self.only = batch_size, num_workers, cost, only
        self.validation = validation

    def train_dataloader(self) -> DataLoader[Any]:
        """For training: shuffled."""
        assert self.trainer is not None
        samples = Samples(4096, self.cost if self.only in (-1, self.trainer.global_rank) else "")
        return DataLoader(samples, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """For validation."""
        return DataLoader(Samples(self.validation, ""), self.batch_size)


class Sleeper(Callback):
    """Sleeps after each batch on the first rank, as a callback that writes pictures does."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Do it."""
        time.sleep(0.1 * trainer.is_global_zero)


class Copied(nn.Module):
    """A layer without parameters that takes long to be copied."""

    def __deepcopy__(self, memo: Any) -> "Copied":
        time.sleep(0.08)
        return Copied()


class AverageByCopy(Callback):
    """Averages the weights, and copies the whole network for that after each batch."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the network's own weights."""
        self.average = copy.deepcopy(pl_module.network)
        self.copied = Copied()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Do it."""
        latest, _ = copy.deepcopy(pl_module.network), copy.deepcopy(self.copied)
        for average, parameter in zip(self.average.parameters(), latest.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.01)


class SlowDisk(TorchCheckpointIO):
    """Takes long to save a checkpoint in a folder with the name ``slow``."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Do it."""
        super().save_checkpoint(checkpoint, path, storage_options)
        time.sleep(1.0 * ("slow" in Path(path).parts))


class HugeLogger(DummyLogger):
    """Takes its time for each thing that is logged."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do it."""
        time.sleep(0.08)
