"""Cases of code that runs in a backward: hooks that depend on their order, draws, and functions of the user."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.strategies.whole_step_cases.base import Block, Classifier, StemBodyHead, case, classifier


@case()
class NoiseInHooks(Classifier):
    """Hooks of parameters draw noise, so their order decides which numbers a gradient gets."""

    def __init__(self) -> None:
        super().__init__()
        for index, parameter in enumerate(self.net.parameters()):
            parameter.register_hook(self.hook(index))

    def hook(self, index: int) -> Any:
        def add_noise(gradient: Tensor) -> Tensor:
            self.history.append(float(index))
            return gradient + 0.01 * torch.randn_like(gradient)

        return add_noise


@case()
class StepsInBackward(Classifier):
    """Each parameter has an optimizer, which steps as soon as the parameter has a gradient."""

    def on_fit_start(self) -> None:
        self.steps = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in self.net.parameters()}
        for parameter in self.steps:
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.steps[parameter].step()
        self.steps[parameter].zero_grad()

    def configure_optimizers(self) -> None:
        return None


class ReversibleFunction(torch.autograd.Function):
    """Computes a reversible block, whose backward calls ``backward`` for the block's own layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Tensor:
        ctx.block = block
        with torch.no_grad():
            first, second = x.chunk(2, 1)
            first = first + block.left(second)
            result = torch.cat([first, second + block.right(first)], 1)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (result,) = ctx.saved_tensors
        first, second = result.detach().chunk(2, 1)
        of_first, of_second = gradients[0].chunk(2, 1)
        with torch.enable_grad():
            first = first.requires_grad_()
            right = ctx.block.right(first)
            right.backward(of_second)
            second = (second - right.detach()).requires_grad_()
            ctx.block.left(second).backward(of_first + first.grad)
        return torch.cat([of_first + first.grad, of_second + second.grad], 1), None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
        self.right = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return ReversibleFunction.apply(x, self)


@case()
class ReversibleBlocks(Classifier):
    block = Reversible


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=True) if x.requires_grad else self.block(x)


@case()
class ReentrantCheckpoint(Classifier):
    block = Reentrant


class ShakeFunction(torch.autograd.Function):
    """Mixes two branches with random weights, and draws other weights in the backward."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return torch.lerp(first, second, torch.rand(len(first), 1, 1, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights = torch.rand(len(gradients[0]), 1, 1, 1)
        return (1 - weights) * gradients[0], weights * gradients[0]


class Shaken(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + ShakeFunction.apply(F.relu(self.conv(x)), self.conv(x.flip(-1)))


@case(microbatches=1)
class ShakeShake(Classifier):
    block = Shaken

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        return F.cross_entropy(self.net(x[order]), y[order])


@case(microbatches=1)
class LateDropout(Classifier):
    """The first steps do not drop anything, and therefore do not draw."""

    def network(self) -> nn.Module:
        return classifier(middle=nn.Dropout(0.0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[2].p = 0.05 * self.global_step


class GhostNorm(nn.BatchNorm2d):
    """Normalises each half of a batch, and so updates its running statistics twice."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(GhostNorm, self).forward(part) for part in input.chunk(2)])


@case()
class GhostNormalisation(Classifier):
    def network(self) -> nn.Module:
        return classifier(middle=GhostNorm(8))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.strength * gradients[0], None


@dataclass
class Scores:
    """Result of a network."""

    classes: Tensor
    domains: Tensor
    features: Tensor
    name: str = "scores"


class DomainNet(StemBodyHead):
    """A network whose own forward reverses gradients, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.domains = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Scores:
        features = self.body(self.stem(x)).mean((2, 3))
        return Scores(self.head(features), self.domains(Reverse.apply(features, 0.5)), features)


@case(cuts=("stem", "body"))
class ReversedGradients(Classifier):
    network = DomainNet

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        assert isinstance(scores, Scores)
        assert scores.name == "scores"
        loss = F.cross_entropy(scores.classes, y) + F.cross_entropy(scores.domains, y % 2)
        return loss + 0.1 * scores.features.std()


@case()
class GrowingHead(Classifier):
    """The last layer has one class more in the second epoch, and keeps the weights of the other classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net[6] = nn.Linear(32, 3)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            head = nn.Linear(32, 4)
            with torch.no_grad():
                head.weight[:3].copy_(self.net[6].weight)
                head.bias[:3] = self.net[6].bias
            self.net[6] = head
            self.trainer.optimizers[0].add_param_group({"params": list(head.parameters())})

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        return F.cross_entropy(scores, y % scores.shape[1])


@case()
class EmptiedState(Classifier):
    """Forgets the moments of the last layer after the first epoch."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            for parameter in self.net[6].parameters():
                self.trainer.optimizers[0].state[parameter] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.history.append(sum(float(state["exp_avg_sq"].sum()) for state in states if state))


@case()
class LateMixing(Classifier):
    """A hook mixes the samples in front of a layer, from the second epoch on."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.current_epoch == 0:
            return F.cross_entropy(self.net(x), y)
        handle = self.net[3].register_forward_pre_hook(
            lambda module, inputs: (0.7 * inputs[0] + 0.3 * inputs[0].flip(0),)
        )
        scores = self.net(x)
        handle.remove()
        return 0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y.flip(0))
