"""SimCLR and MoCo on the digits, as plain LightningModules: nothing in this file knows a strategy."""

import copy
import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


def make_encoder() -> nn.Sequential:
    """Return a network from images (N, 1, 8, 8) to embeddings (N, 32). Its first 10 layers give features (N, 128)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(4, 64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)),
    )


def view(images: Tensor) -> Tensor:
    """Return images that are turned, scaled and moved at random, with noise."""
    count, device = len(images), images.device
    angle, scale = (torch.rand(2, count, device=device) - 0.5) * torch.tensor([[0.7], [0.5]], device=device)
    moves = (torch.rand(count, 2, 1, device=device) - 0.5) * 0.5
    cosine, sine = angle.cos() * (1 + scale), angle.sin() * (1 + scale)
    turns = torch.stack([torch.stack([cosine, -sine], 1), torch.stack([sine, cosine], 1)], 1)
    grid = F.affine_grid(torch.cat([turns, moves], 2), list(images.shape), align_corners=False)
    turned = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return turned + 0.1 * torch.randn_like(turned)


class SimCLR(LightningModule):
    """SimCLR (Chen et al. 2020): the other images of the batch are the negatives."""

    def __init__(self, temperature: float = 0.2, lr: float = 0.002) -> None:
        super().__init__()
        self.temperature, self.lr = temperature, lr
        self.encoder = make_encoder()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        z = F.normalize(self.encoder(torch.cat([view(images), view(images)])), dim=1)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        logits = (z @ z.T / self.temperature).masked_fill(itself, -math.inf)
        loss = F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(images)))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.encoder.parameters(), lr=self.lr)


class MoCo(SimCLR):
    """MoCo (He et al. 2020): an average of the encoder embeds the negatives, which are in a queue.

    The other images of the batch are negatives as well, as in the paper's third version (Chen et al. 2021). Without
    them the encoder has no negatives of its own kind in the first steps, and does not recover within a few epochs.
    """

    def __init__(self, queue: int = 128, momentum: float = 0.95, temperature: float = 0.1, lr: float = 0.002) -> None:
        super().__init__(temperature, lr)
        self.momentum = momentum
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(queue, 32), dim=1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images = batch[0]
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 1 - self.momentum)
            keys = F.normalize(self.average(view(images)), dim=1)
        queries = F.normalize(self.encoder(view(images)), dim=1)
        logits = queries @ torch.cat([keys, self.queue]).T / self.temperature
        loss = F.cross_entropy(logits, torch.arange(len(images), device=self.device))
        self.queue = torch.cat([keys, self.queue])[: len(self.queue)]
        self.log("train_loss", loss)
        return loss
