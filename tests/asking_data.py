"""Data module as users write it: it asks its trainer for the number of processes, and a batch has three tensors."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset


class AskingData(LightningDataModule):
    """Images (1, 8, 8) of ten classes, with labels and indices; the processes divide batches of `samples` images."""

    def __init__(self, samples: int = 64) -> None:
        super().__init__()
        self.samples = samples

    def setup(self, stage: str) -> None:
        assert self.trainer.global_rank < self.trainer.world_size
        images = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.dataset = TensorDataset(images, torch.arange(96) % 10, torch.arange(96))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.samples // self.trainer.world_size)

    val_dataloader = train_dataloader
