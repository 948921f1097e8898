"""Cases of backward passes: hooks and functions that combine or store gradients, penalties of gradients, contexts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.whole_step_cases.base import Block, Classifier, Dense, Manual, case, classifier


def normalised(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-8)


@case()
class NormalisedGradients(Classifier):
    """A hook divides the gradient of a block's output by its norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].register_full_backward_hook(lambda module, inputs, outputs: (normalised(inputs[0]),))


@case()
class HookOfActivations(Classifier):
    """A forward hook registers a hook of the output, which normalises the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(self.hook)

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(normalised)


class ClippedInBackward(torch.autograd.Function):
    """The identity, whose gradient is at most as long as a norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.clamp(0.01 / gradient.norm(), max=1.0)


class Clipping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ClippedInBackward.apply(x)


@case()
class ClippedActivations(Classifier):
    middle = Clipping


class Rounded(torch.autograd.Function):
    """Rounds in the forward, and passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x)


@case()
class StraightThrough(Classifier):
    middle = Quantised


@case()
class GradCam(Classifier):
    """Hooks keep a block's output and its gradient, and the step logs a map of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.net[3].register_forward_hook(lambda module, inputs, output: self.kept.update(maps=output.detach()))
        self.net[3].register_full_backward_hook(lambda module, inputs, outputs: self.kept.update(gradient=outputs[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = self.kept["gradient"].mean((2, 3), keepdim=True)
        self.log("map", F.relu((weights * self.kept["maps"]).sum(1)).amax())
        self.history += self.kept["gradient"].square().sum((1, 2, 3)).tolist()


@case()
class GradientNorms(Classifier):
    """A hook records the norm of a gradient, as a number, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_full_backward_hook(self.record)

    def record(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.history.append(outputs[0].norm().item())


@case()
class WassersteinPenalty(Classifier):
    """Adds a penalty of the gradient with respect to mixed images, as WGAN-GP does."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = (x + 0.5 * x.roll(1, 0)).requires_grad_()
        scores = self.net(mixed)
        (gradient,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return F.cross_entropy(self.net(x), y) + 0.5 * penalty


@case()
class CurvatureOfWeights(Classifier):
    """Adds a penalty of the gradient with respect to the weights."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        gradients = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        return loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)


@case(microbatches=1, error="create_graph=True.*BatchNorm")
class PenaltyWithBatchNorm(WassersteinPenalty):
    def network(self) -> nn.Module:
        return classifier(middle=nn.BatchNorm2d(8))


class ContextNet(nn.Module):
    """A network whose own forward enters contexts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), Block(), Block()
        self.head, self.level = nn.Linear(8, 5), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.stem(x)
            with torch.enable_grad():
                shift = self.level.square()
        x = self.first(x) + shift
        with torch.autocast("cpu", enabled=False):
            x = self.second(x).mean((2, 3))
        return self.head(x)


@case(cuts=("exit_context_1", "first"), validates=True)
class ContextsInForward(Classifier):
    def network(self) -> nn.Module:
        network = ContextNet()
        network.stem.requires_grad_(False)
        return network

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", F.cross_entropy(self.net(batch[0]), batch[1]))
        self.history.append(float(torch.is_grad_enabled()))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@case()
class CheckpointInBlocks(Classifier):
    block = Recomputed


class AliasNet(nn.Module):
    """A network that changes a view in place, and then uses the tensor of which it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), Block(), Block()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        flat = x.flatten(2)
        y = self.first(x * 2)
        flat.mul_(0.5)
        return self.head((self.second(y) + x).mean((2, 3)))


@case(cuts=("second", "add_2"))
class ViewChangedInPlace(Classifier):
    network = AliasNet


@case(cuts=("first", "second"), error="nearest cut")
class CutBetweenViews(ViewChangedInPlace):
    """A cut between the view and the change of the view is refused."""


class Halving(nn.Module):
    """A module that halves its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return self.conv(x)


class SkipNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.halving, self.body, self.head = nn.Conv2d(3, 8, 3, 2, 1), Halving(), Block(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.halving(x)
        y = self.body(y)
        return self.head((y + x).mean((2, 3)))


@case(cuts=("halving", "body"))
class ChangedArgument(Classifier):
    """A module changes its argument in place, which a later stage uses as well."""

    network = SkipNet


@case()
class ToggledOptimizers(Manual, Dense):
    """Trains the network against a critic. The step begins with a change of what requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, 2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images = batch[0]
        of_network, of_critic = self.optimizers()
        self.toggle_optimizer(of_network)
        restored = self.net(images.flip(-1))
        loss = F.l1_loss(restored, images) - self.critic(restored).mean()
        self.train_with(loss, of_network)
        self.untoggle_optimizer(of_network)
        self.toggle_optimizer(of_critic)
        difference = F.softplus(self.critic(restored.detach())).mean() + F.softplus(-self.critic(images)).mean()
        self.train_with(difference, of_critic)
        self.untoggle_optimizer(of_critic)
        self.log_dict({"loss": loss, "difference": difference})

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=5e-3) for part in (self.net, self.critic)]
