"""Cases of hooks: hooks of tensors and modules, freezing, attributes of layers, and work on gradients."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import Classifier, case


class Temperature(nn.Module):
    tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.tau


class RunningMean(nn.Module):
    """A layer that subtracts a running mean, which it updates first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return x - self.mean.view(1, -1, 1, 1)


@case()
class Plain(Classifier):
    pass


@case()
class TensorHook(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[6].parameters():
            parameter.register_hook(lambda gradient: gradient * 0.1)


@case()
class AnnealedTemperature(Classifier):
    middle = Temperature

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.net.modules():
            if isinstance(module, Temperature):
                module.tau = 1.0 + 0.2 * self.global_step


@case()
class HookPenalty(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []
        self.net[3].register_forward_hook(lambda module, inputs, out: self.penalties.append(out.square().mean()))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.penalties.clear()
        loss = F.cross_entropy(self.net(x), y)
        return loss + sum(self.penalties)


@case()
class UpdatedBuffer(Classifier):
    middle = RunningMean


@case()
class Counts(Classifier):
    def on_train_start(self) -> None:
        self.history += [float(sum(p.numel() for p in self.net.parameters())), float(len(self.net))]
        self.history.append(float(sum(p.numel() for p in self.parameters() if p.requires_grad)))


@case()
class NormAfterStep(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None))


@case()
class OwnClipping(Classifier):
    def on_after_backward(self) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.net.parameters(), 0.1))


# The cases from here on are not in the reproductions or the prototypes.


@case()
class DecayByDepth(Classifier):
    """Scales gradients by the layer's number in the parameter's name."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            depth = int(re.match(r"net\.(\d+)\.", name)[1])
            parameter.grad *= 0.8 ** (6 - depth)


@case()
class CentralizedGradients(Classifier):
    def on_after_backward(self) -> None:
        for parameter in self.net.parameters():
            if parameter.dim() > 1:
                axes = tuple(range(1, parameter.dim()))
                parameter.grad = parameter.grad - parameter.grad.mean(axes, keepdim=True)


@case()
class AdaptiveClipping(Classifier):
    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            largest = 0.02 * parameter.norm().clamp(min=1e-3)
            norm = parameter.grad.norm()
            if norm > largest:
                parameter.grad.mul_(largest / norm)
                self.history.append(norm.item())


@case()
class SignOfGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_().mul_(0.01)


@case()
class ThawedByName(Classifier):
    def on_train_epoch_start(self) -> None:
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad = self.current_epoch > 0 or name.startswith(("3.", "6."))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@case()
class GradientsAverage(Classifier):
    """Keeps a moving average of the gradients and adds it, as Grokfast does."""

    def on_train_start(self) -> None:
        self.average = {name: torch.zeros_like(p) for name, p in self.named_parameters()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            self.average[name] = 0.9 * self.average[name] + 0.1 * parameter.grad.detach()
            parameter.grad += 2.0 * self.average[name]


@case()
class SparseActivations(Classifier):
    """A forward hook records how many activations are zero, and adds a term to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.activity: dict[str, Tensor] = {}
        for name, module in self.net.named_modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(self.recorder(name))

    def recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.activity[name] = output.abs().mean()

        return record

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log_dict({f"activity_{name}".replace(".", "_"): value for name, value in self.activity.items()})
        return loss + 0.1 * sum(self.activity.values())


@case()
class HooksOnRankZero(Classifier):
    """Rank 0 alone looks at activations, and keeps them, from the second and the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.global_step == 1:
            self.net[0].register_forward_hook(lambda module, args, output: None)
        if self.trainer.is_global_zero and self.global_step == 2:
            self.net[1].register_forward_hook(keep_output)


def keep_output(module: nn.Module, args: Any, output: Tensor) -> None:
    module.kept = output.detach()
