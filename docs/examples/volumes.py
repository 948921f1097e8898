"""A 3-D U-Net that segments volumes, as a plain LightningModule and its data: nothing in this file divides a volume."""

import itertools

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=False), nn.InstanceNorm3d(outputs), nn.LeakyReLU()]
    return nn.Sequential(*layers)


class UNet3D(nn.Module):
    """Maps volumes (N, 1, D, H, W) to scores (N, classes, D, H, W). Each resolution is half of the previous one."""

    def __init__(self, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(convolutions(*pair) for pair in itertools.pairwise((1, *widths)))
        self.up = nn.ModuleList(convolutions(low + high, high) for high, low in itertools.pairwise(widths))
        self.scores = nn.Conv3d(widths[0], classes, 1)

    def forward(self, volumes: Tensor) -> Tensor:
        skipped, features = [], volumes
        for level, block in enumerate(self.down):
            features = block(F.max_pool3d(features, 2) if level else features)
            skipped.append(features)
        for block, finer in zip(reversed(self.up), reversed(skipped[:-1]), strict=True):
            enlarged = F.interpolate(features, size=finer.shape[2:], mode="trilinear", align_corners=False)
            features = block(torch.cat([finer, enlarged], dim=1))
        return self.scores(features)


class VolumeSegmenter(LightningModule):
    """Trains with cross-entropy and the Dice loss, which both cover all voxels of a volume."""

    def __init__(self, classes: int = 3, widths: tuple[int, ...] = (8, 16, 32, 64), lr: float = 0.003) -> None:
        super().__init__()
        self.classes, self.lr = classes, lr
        self.network = UNet3D(classes, widths)

    def forward(self, volumes: Tensor) -> Tensor:
        return self.network(volumes)

    def dice(self, probabilities: Tensor, masks: Tensor) -> Tensor:
        """Return the mean Dice coefficient of all classes but the background."""
        true = F.one_hot(masks, self.classes).movedim(-1, 1).to(probabilities.dtype)
        both = (probabilities * true).sum(dim=(0, 2, 3, 4))
        sizes = probabilities.sum(dim=(0, 2, 3, 4)) + true.sum(dim=(0, 2, 3, 4))
        return ((2 * both + 1) / (sizes + 1))[1:].mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        volumes, masks = batch
        scores = self(volumes)
        loss = F.cross_entropy(scores, masks) + 1 - self.dice(scores.softmax(dim=1), masks)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        volumes, masks = batch
        chosen = F.one_hot(self(volumes).argmax(dim=1), self.classes).movedim(-1, 1)
        self.log("val_dice", self.dice(chosen.float(), masks), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Balls(Dataset):
    """Noisy volumes (1, size, size, size) with two kinds of balls, and masks (size, size, size) with their kinds."""

    def __init__(self, first: int, count: int, size: int) -> None:
        self.first, self.count, self.size = first, count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(self.first + index)
        axis = torch.arange(self.size)
        mask = torch.zeros(self.size, self.size, self.size, dtype=torch.int64)
        for ball in range(6):
            centre = self.size * torch.rand(3, generator=random)
            radius = self.size * (0.1 + 0.1 * torch.rand((), generator=random))
            depth, height, width = ((axis - place) ** 2 for place in centre)
            mask[depth[:, None, None] + height[:, None] + width < radius**2] = 1 + ball % 2
        return (mask + torch.randn(mask.shape, generator=random))[None], mask


class BallsData(LightningDataModule):
    def __init__(self, size: int = 128, volumes: int = 20, batch_size: int = 1) -> None:
        super().__init__()
        self.size, self.volumes, self.batch_size = size, volumes, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Balls(0, self.volumes, self.size), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Balls(self.volumes, max(1, self.volumes // 5), self.size), self.batch_size)
