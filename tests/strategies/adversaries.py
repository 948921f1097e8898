"""Modules with manual optimization and several optimizers, as in tutorials and papers, and their training.

The random numbers that a step needs are part of the data, so that all divisions of a batch use the same numbers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart

SAMPLES, BATCH = 32, 8


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.score = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.leaky_relu(self.conv2(x), 0.2)
        return self.score(x.flatten(1))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 32)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.ConvTranspose2d(4, 1, 4, 2, 1)

    def forward(self, z: Tensor) -> Tensor:
        x = F.relu(self.linear(z).view(-1, 8, 2, 2))
        return torch.tanh(self.out(F.relu(self.up(x))))


class Adversaries(LightningModule):
    """Base class of the modules, with the data: images, noise, and places between real and generated images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.critic = Generator().double(), Critic().double()

    def train_dataloader(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1)
        images = torch.rand(SAMPLES, 1, 8, 8, generator=random, dtype=torch.float64)
        noise = torch.randn(SAMPLES, 4, generator=random, dtype=torch.float64)
        places = torch.rand(SAMPLES, 1, 1, 1, generator=random, dtype=torch.float64)
        data, ranks = TensorDataset(images, noise, places), self.trainer.world_size
        sampler = DistributedSampler(data, ranks, self.trainer.global_rank, seed=7)
        return DataLoader(data, BATCH // ranks, sampler=sampler)


class LightningsExample(Adversaries):
    """The step of Lightning's example generative_adversarial_net.py, which its issue 20866 is about."""

    def adversarial_loss(self, y_hat: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch: Any) -> None:
        imgs, z, _ = batch
        optimizer_g, optimizer_d = self.optimizers()

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.critic(self.generator(z)), valid)
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.critic(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.critic(self.generator(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.critic
        return [Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.999)) for part in parts], []


class WassersteinGradientPenalty(Adversaries):
    """WGAN-GP (Gulrajani et al. 2017): a critic that steps more often, a gradient penalty, and two schedules."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, z, place = batch
        of_generator, of_critic = self.optimizers()
        schedules = self.lr_schedulers()
        self.toggle_optimizer(of_critic)
        fake = self.generator(z).detach()
        mixed = (place * real + (1 - place) * fake).requires_grad_(True)
        scores = self.critic(mixed)
        (gradients,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
        penalty = ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
        of_critic.zero_grad()
        self.manual_backward(self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty)
        of_critic.step()
        schedules[1].step()
        self.untoggle_optimizer(of_critic)
        if (batch_idx + 1) % 2 == 0:
            self.toggle_optimizer(of_generator)
            of_generator.zero_grad()
            self.manual_backward(-self.critic(self.generator(z)).mean())
            of_generator.step()
            schedules[0].step()
            self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> Any:
        optimizers = [Adam(part.parameters(), 2e-3, (0.0, 0.9)) for part in (self.generator, self.critic)]
        return optimizers, [StepLR(optimizers[0], 1, 0.5), ExponentialLR(optimizers[1], 0.9)]


class AccumulatedAndClipped(Adversaries):
    """Several backward passes for a step, accumulated over two batches, clipped by hand, with other optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, z, _ = batch
        of_generator, of_critic = self.optimizers()
        fake = self.generator(z)
        self.manual_backward(F.softplus(-self.critic(images)).mean() / 2)
        self.manual_backward(F.softplus(self.critic(fake.detach())).mean() / 2)
        if batch_idx % 2:
            self.clip_gradients(of_critic, 0.05, "norm")
            of_critic.step()
            of_critic.zero_grad()
        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(self.generator(z))).mean())
        self.clip_gradients(of_generator, 0.01, "value")
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> Any:
        return [AdamW(self.generator.parameters(), 2e-3), SGD(self.critic.parameters(), 0.1, momentum=0.9)]


class SharedGraph(AccumulatedAndClipped):
    """Generates once, and lets the generator's backward also add to the critic's gradients. One step has a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, z, _ = batch
        of_generator, of_critic = self.optimizers()
        fake = self.generator(z)

        def closure() -> Tensor:
            loss = F.softplus(-self.critic(images)).mean() + F.softplus(self.critic(fake.detach())).mean()
            of_critic.zero_grad()
            self.manual_backward(loss)
            return loss

        of_critic.step(closure=closure)
        of_generator.zero_grad()
        self.manual_backward(F.softplus(-self.critic(fake)).mean())
        of_generator.step()


class OtherOrder(LightningsExample):
    """Steps both optimizers, and in the third batch on rank 1 in the other order."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers[::-1] if batch_idx == 2 and self.global_rank else optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.generator(batch[1])).square().mean())
            optimizer.step()


class ConstantSlopes(Adversaries):
    """Two layers whose gradients are 1, so that their sums of weights count the steps. The second has half as many."""

    def __init__(self) -> None:
        super().__init__()
        del self.generator, self.critic
        self.layers = nn.ModuleList(nn.Linear(1, 4, bias=False, dtype=torch.float64) for _ in range(2))
        for layer in self.layers.children():
            nn.init.zeros_(layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        chosen = (0, 1) if batch_idx % 2 else (0,)
        for layer, optimizer in [(self.layers[index], self.optimizers()[index]) for index in chosen]:
            optimizer.zero_grad()
            self.manual_backward(layer(torch.ones(1, 1, dtype=torch.float64)).sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD(layer.parameters(), lr=0.25) for layer in self.layers.children()]


class TogglesOne(Adversaries):
    """The program of Lightning's issue 21513: automatic optimization, and a step that toggles the only optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        del self.generator

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.toggle_optimizer(self.optimizers())
        images, _, places = batch
        loss = F.mse_loss(self.critic(images), places.flatten(1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return Adam(self.parameters(), lr=0.02)


def compiled(kind: type[LightningModule]) -> LightningModule:
    """Return a compiled module."""
    module: Any = torch.compile(kind(), backend="eager")
    return module


COMPILED: dict[str, Callable[[], LightningModule]] = {
    f"compiled {kind.__name__}": partial(compiled, kind) for kind in (LightningsExample, TogglesOne)
}


KINDS: dict[str, Callable[[], LightningModule]] = {
    kind.__name__: kind for kind in (LightningsExample, WassersteinGradientPenalty, AccumulatedAndClipped, SharedGraph)
}
COUNTING: dict[str, Callable[[], LightningModule]] = {"ConstantSlopes": ConstantSlopes}


def train(kinds: list[str], strategy: Callable[[], Any], devices: int, **options: Any) -> dict[str, Any]:
    """Train modules, one after the other, in one process each with its ranks, and return their checkpoints."""

    def run() -> dict[str, Any]:
        checkpoints = {}
        for kind in kinds:
            saved = ModelCheckpoint(Path.cwd(), kind, save_top_k=1)
            trainer = quiet_trainer(
                strategy(),
                devices,
                enable_checkpointing=True,
                callbacks=[saved],
                use_distributed_sampler=False,
                **{"max_epochs": 1} | options,
            )
            trainer.fit((KINDS | COMPILED | COUNTING)[kind]())
            checkpoints[kind] = torch.load(f"{kind}.ckpt", weights_only=True)
        return checkpoints

    result: dict[str, Any] = run_apart(run)
    return result
