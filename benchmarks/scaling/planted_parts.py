"""A module, data and callbacks with causes of slowness, as a user brings them without wanting to; see planted.py."""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))
GROUP = "CNNSTRATEGIES_SLOW_GROUP"


class Net(LightningModule):
    """A small convolutional network with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 128]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        ]
        self.network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy."""
        images, targets = batch
        loss = nn.functional.cross_entropy(self.network(images), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The same, logged."""
        self.log("val_loss", self.training_step(batch, batch_idx))

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
            time.sleep(0.004)
        if self.cost == "computes":  # In few calls, during which others have the interpreter's lock.
            image = image + 0 * self.noise.sort().values[0]
        if self.cost == "holds the lock":
            sum(number * number for number in range(60_000))
        return image, index % 10


class Data(LightningDataModule):
    """A data module with loaders of these images."""

    def __init__(
        self,
        batch_size: int = 32,
        num_workers: int = 0,
        cost: str = "",
        validation: int = 64,
    ) -> None:
        super().__init__()
        self.batch_size, self.num_workers, self.cost = batch_size, num_workers, cost
        self.validation = validation

    def train_dataloader(self) -> DataLoader[Any]:
        """For training: shuffled."""
        samples = Samples(4096, self.cost)
        return DataLoader(samples, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """For validation."""
        return DataLoader(Samples(self.validation, ""), self.batch_size)


class Sleeper(Callback):
    """Sleeps after each batch."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Do it."""
        time.sleep(0.05)


class SlowRank(Callback):
    """Each rank has a processor quota of its own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the process into its group."""
        from quotas import Group

        if GROUP in os.environ:
            Group(f"{os.environ[GROUP]}{trainer.global_rank}").enter()


class HugeLogger(DummyLogger):
    """Takes its time for each thing that is logged."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do it."""
        time.sleep(0.05)
