"""A GAN for the digits, as a plain LightningModule with two optimizers: nothing in this file knows a strategy."""

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchvision.utils import save_image


class Generator(nn.Sequential):
    """Maps noise (N, noise) to images (N, 1, 8, 8)."""

    def __init__(self, noise: int) -> None:
        super().__init__(
            *(nn.Linear(noise, 256), nn.ReLU(), nn.Unflatten(1, (64, 2, 2))),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GroupNorm(4, 32), nn.ReLU()),
            *(nn.ConvTranspose2d(32, 1, 4, 2, 1),),
        )


class Critic(nn.Sequential):
    """Maps images (N, 1, 8, 8) to scores (N, 1)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, 1, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(1024, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)),
        )


class DigitsGan(LightningModule):
    """Trains the critic and the generator in each step, with the loss of Goodfellow et al. (2014) and R1 penalty.

    After each epoch it writes generated images into the folder ``samples`` of the log directory, and logs ``distance``,
    the Frechet distance between pixels of 1000 generated and of all training images.
    """

    def __init__(self, noise: int = 16, lr: float = 0.001, penalty: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.noise, self.lr, self.penalty = noise, lr, penalty
        self.generator, self.critic = Generator(noise), Critic()
        random = torch.Generator().manual_seed(0)
        self.register_buffer("fixed", torch.randn(1000, noise, generator=random), persistent=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real = batch[0]
        of_generator, of_critic = self.optimizers()
        noise = torch.randn(len(real), self.noise, device=self.device)

        self.toggle_optimizer(of_critic)
        real.requires_grad_()
        scores = self.critic(real)
        (slopes,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss = F.softplus(-scores).mean() + F.softplus(self.critic(self.generator(noise))).mean()
        of_critic.zero_grad()
        self.manual_backward(loss + self.penalty * slopes.square().sum(dim=(1, 2, 3)).mean())
        of_critic.step()
        self.untoggle_optimizer(of_critic)

        self.toggle_optimizer(of_generator)
        deception = F.softplus(-self.critic(self.generator(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(deception)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"critic_loss": loss, "generator_loss": deception})

    @torch.no_grad()
    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        if not self.trainer.is_last_batch:
            return
        images = self.generator(self.fixed).cpu()
        data = self.trainer.datamodule
        real = data.eval_transform(data.train_source.images)
        distance = frechet_distance(images.flatten(1), real.flatten(1))
        self.log("distance", distance, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        folder = Path(self.trainer.log_dir or ".", "samples")  # All processes agree on the folder.
        if self.trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"epoch_{self.current_epoch:03}.png"
            save_image(F.interpolate(images[:64], scale_factor=4), folder / name, normalize=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = self.generator, self.critic
        return [torch.optim.Adam(part.parameters(), lr=self.lr, betas=(0.5, 0.99)) for part in parts]


def frechet_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the Frechet distance of two normal distributions with the means and covariances of rows."""
    first, second = first.double(), second.double()
    covariances = torch.cov(first.T), torch.cov(second.T)
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    means = (first.mean(0) - second.mean(0)).square().sum()
    return means + covariances[0].trace() + covariances[1].trace() - 2 * root
