"""A module and data that know nothing of this package, and what tells of a run's first step."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override


class Data(LightningDataModule):
    """Random images."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(256, 1, 8, 8), torch.randint(10, (256,))), batch_size=32)


class Module(LightningModule):
    """A small CNN."""

    def __init__(self, width: int = 32, lr: float = 0.1) -> None:
        super().__init__()
        convolution = nn.Conv2d(1, width, 3, padding=1)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
        self.network = nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(), *head)
        self.lr = lr

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


class FirstStep(Callback):
    """Leaves a file for each rank in the folder ``FIRST_STEPS`` after its first step, and stops there."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        Path(os.environ["FIRST_STEPS"], str(trainer.global_rank)).touch()
        time.sleep(1000)
