"""Cases that change the images in the step: mixed samples, noise, views and adversarial images."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import Classifier, Dense, case, classifier


@case()
class Denoising(Dense):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(self.net(x + 0.3 * torch.randn_like(x)), x)


@case()
class AdversarialImages(Dense):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        delta = torch.zeros_like(x, requires_grad=True)
        (gradient,) = torch.autograd.grad(F.mse_loss(self.net(x + delta), x), delta)
        return F.mse_loss(self.net(x + 0.1 * gradient.sign()), x)


@case()
class NoisyOutputs(Classifier):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        scores = scores + 0.1 * torch.randn(scores.shape)
        return F.cross_entropy(scores + 0.1 * torch.randn_like(scores), y)


# The cases from here on are not in the reproductions or the prototypes.


@case()
class BetaMixup(Classifier):
    """Draws a weight for each sample from a Beta distribution, with soft labels."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.distributions.Beta(0.4, 0.4).sample((len(x),)).to(x)
        order = torch.randperm(len(x))
        labels = F.one_hot(y, 5).to(x)
        mixed = torch.lerp(x[order], x, weights.view(-1, 1, 1, 1))
        soft = torch.lerp(labels[order], labels, weights.view(-1, 1))
        return F.cross_entropy(self.net(mixed), soft)


@case()
class Cutmix(Classifier):
    """Puts a rectangle of other images into the batch, in place, with numpy's random numbers."""

    def on_train_start(self) -> None:
        self.random = np.random.RandomState(4)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.random.beta(1.0, 1.0)
        order = torch.from_numpy(self.random.permutation(len(x)))
        side = int(8 * np.sqrt(1 - weight))
        row, column = self.random.randint(0, 9 - side, 2) if side else (0, 0)
        x[:, :, row : row + side, column : column + side] = x[order, :, row : row + side, column : column + side]
        weight = 1 - side**2 / 64
        scores = self.net(x)
        return weight * F.cross_entropy(scores, y) + (1 - weight) * F.cross_entropy(scores, y[order])


@case()
class ProjectedDescent(Classifier):
    """Trains with images that three steps of projected gradient descent have made adversarial."""

    def attack(self, x: Tensor, y: Tensor) -> Tensor:
        images = x.detach().clone() + torch.empty_like(x).uniform_(-0.05, 0.05)
        for _ in range(3):
            images.requires_grad_(True)
            with torch.enable_grad():
                loss = F.cross_entropy(self.net(images), y)
            gradient = torch.autograd.grad(loss, [images])[0]
            images = images.detach() + 0.03 * torch.sign(gradient.detach())
            images = torch.min(torch.max(images, x - 0.1), x + 0.1)
        return images

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        images = self.attack(x, y)
        clean, attacked = self.net(x), self.net(images)
        robust = F.kl_div(attacked.log_softmax(1), clean.softmax(1), reduction="batchmean")
        return F.cross_entropy(clean, y) + 2 * robust


@case()
class BatchStatistics(Classifier):
    """Normalises the images by the batch's mean and deviation, and keeps running ones in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        mean, deviation = x.mean((0, 2, 3)), x.std((0, 2, 3))
        self.mean += 0.1 * (mean - self.mean)
        self.seen += len(x)
        return F.cross_entropy(self.net((x - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)), y)


@case()
class RandomErasing(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        if self.trainer.training:
            masks = (torch.rand(len(x), 1, 8, 8) > 0.2).to(x)
            x = x * masks + (1 - masks) * x.mean()
        return x, y


@case()
class BlurredImages(Classifier):
    """Blurs images with a fixed convolution outside the network, more and more."""

    def __init__(self) -> None:
        super().__init__()
        self.blur = nn.Conv2d(3, 3, 3, padding=1, groups=3, bias=False).requires_grad_(False)
        nn.init.constant_(self.blur.weight, 1 / 9)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        strength = min(1.0, self.global_step / 8)
        return F.cross_entropy(self.net(torch.lerp(x, self.blur(x), strength)), y)


@case()
class SeveralCrops(Classifier):
    """Calls the network with crops of two sizes, and once with all crops of a size in one batch."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        large = self.net(torch.cat([x, x.flip(-1)])).chunk(2)
        corners = [x[..., :6, :6], x[..., 2:, 2:], x[..., 1:7, 1:7]]
        small = self.net(torch.stack(corners).flatten(0, 1)).view(3, len(x), -1)
        target = (large[0] + large[1]).detach().softmax(1)
        return F.cross_entropy(large[0], y) - (target * small.log_softmax(-1)).sum(-1).mean()


@case()
class GradientPenalty(Classifier):
    """Adds the norm of the images' gradients to the loss as a number, without a second derivative."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_(True)
        loss = F.cross_entropy(self.net(x), y)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        norms = gradient.flatten(1).norm(dim=1)
        self.log("steepest", norms.max())
        return loss * (1 + norms.mean().detach())


@case()
class SaliencyMask(Classifier):
    """Keeps the pixels with the largest gradient of the predicted class."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        images = x.clone().requires_grad_()
        scores = self.net(images)
        scores.max(1).values.sum().backward()
        saliency = images.grad.abs().amax(1, keepdim=True)
        self.zero_grad()
        limit = saliency.flatten(1).kthvalue(16, dim=1).values.view(-1, 1, 1, 1)
        return F.cross_entropy(self.net(x * (saliency >= limit)), y)


@case()
class RandomPatches(Dense):
    """Hides patches and reconstructs them, as a masked autoencoder does."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        order = torch.rand(len(x), 16).argsort(1)
        hidden = torch.zeros(len(x), 16).scatter_(1, order[:, :10], 1.0).view(-1, 1, 4, 4)
        mask = F.interpolate(hidden, scale_factor=2)
        restored = self.net(x * (1 - mask))
        return ((restored - x).square().mean(1, keepdim=True) * mask).sum() / mask.sum()


@case()
class WeightedSamples(Classifier):
    """Draws a bootstrap of the batch, of another size, in the step."""

    def network(self) -> nn.Module:
        return classifier(middle=nn.InstanceNorm2d(8, affine=True))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = torch.multinomial(torch.ones(len(x)) / len(x), 6, replacement=True)
        return F.cross_entropy(self.net(x[chosen]), y[chosen], label_smoothing=0.1)
