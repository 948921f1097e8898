"""Losses, gradient norms, learning rates and requirements of gradients in the steps since the last check.

Nothing is read on the host before :meth:`StepRecords.take`, because a read makes the CPU wait for its device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._torch_private import norms_of


@dataclass
class GradientBlock:
    """Gradients of the same parameters in consecutive steps of an optimizer.

    Attributes:
        owners: Ids of the parameters.
        steps: Numbers of the steps.
        rates: Learning rates of the optimizer's groups in each step.
        sizes: Number of the parameters in each group.
        norms: Norms of the gradients in each step.
    """

    owners: list[int]
    sizes: list[int]
    steps: list[int] = field(default_factory=list)
    rates: list[list[float | Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


@dataclass
class TakenRecords:
    """Values of the steps since the last check, on the host.

    Attributes:
        losses: Number of the step and loss of each batch whose loss is on this rank.
        gradients: Number of the step, names of the parameters, norms of their gradients, and norm of all of them, for
            each step of an optimizer.
        reach: Largest product of a finite norm and the step's learning rate, for each parameter with a gradient.
        trainable: Names of the parameters that have required a gradient at any time since the last check.
        rates: Smallest and largest learning rate of all optimizers' groups.
    """

    losses: list[tuple[int, float]]
    gradients: list[tuple[int, list[str], Tensor, float]]
    reach: dict[str, float]
    trainable: set[str]
    rates: tuple[float, float]

    def norms(self) -> list[tuple[int, float]]:
        """Return the number of each step, and the norm of all gradients of the step."""
        return [(step, total) for step, _, _, total in self.gradients]

    def at(self, step: int) -> dict[str, float]:
        """Return the norms of the gradients of a step by parameter."""
        return {
            name: norm
            for other, names, norms, _ in self.gradients
            if other == step
            for name, norm in zip(names, norms.tolist(), strict=True)
        }


class StepRecords:
    """Recorder of steps.

    Args:
        module: The module that is trained.
        is_held: Function that tells whether this rank has the values of a tensor.
    """

    def __init__(self, module: nn.Module, is_held: Callable[[Tensor], bool]) -> None:
        self._module, self._is_held = module, is_held
        self._begin()

    def _begin(self) -> None:
        self._named = dict(self._module.named_parameters())
        self._losses: list[tuple[int, Tensor]] = []
        self._blocks: list[GradientBlock] = []
        self._trainable: set[int] = set()

    def observe(self) -> None:
        """Record which parameters require a gradient now. Code may change this within a step."""
        if len(self._trainable) < len(self._named):
            self._trainable.update(id(parameter) for parameter in self._named.values() if parameter.requires_grad)

    def add_gradients(self, step: int, optimizer: Optimizer) -> None:
        """Record the norms of the gradients with which an optimizer makes a step."""
        self.observe()
        block = GradientBlock([], [])
        rates: list[float | Tensor] = []
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            before = len(gradients)
            for parameter in group["params"]:
                gradient = parameter.grad if self._is_held(parameter) else None
                if gradient is not None and gradient.layout is torch.strided and gradient.is_floating_point():
                    block.owners.append(id(parameter))
                    gradients.append(gradient)
            block.sizes.append(len(gradients) - before)
            rate = group.get("lr", 0.0)
            rates.append(rate.clone() if isinstance(rate, Tensor) else rate)
        if not gradients:
            return
        last = self._blocks[-1] if self._blocks else block
        if last is block or last.owners != block.owners or last.sizes != block.sizes:
            self._blocks.append(block)
            last = block
        last.steps.append(step)
        last.rates.append(rates)
        last.norms.append(norms_of(gradients))

    def add_loss(self, step: int, loss: object) -> None:
        """Record the loss of a batch, if it is a number that this rank has."""
        if type(loss) is Tensor and loss.numel() == 1 and loss.layout is torch.strided and self._is_held(loss):
            self._losses.append((step, loss.detach().reshape(()).to(torch.float32, copy=True)))

    def take(self, optimizers: Sequence[Optimizer]) -> TakenRecords:
        """Return the records since the last call, and begin again."""
        self.observe()
        names = {id(parameter): name for name, parameter in self._named.items()}
        values = torch.stack([loss for _, loss in self._losses]).tolist() if self._losses else []
        losses = [(step, value) for (step, _), value in zip(self._losses, values, strict=True)]
        gradients, reach = [], dict[str, float]()
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        for block in self._blocks:
            norms = torch.stack(block.norms).cpu().double()
            per_group = torch.tensor([[float(rate) for rate in row] for row in block.rates], dtype=torch.float64)
            rates += [float(per_group.min()), float(per_group.max())]
            products = norms * per_group.repeat_interleave(torch.tensor(block.sizes), dim=1)
            owners = [names.get(owner, "a parameter outside of the module") for owner in block.owners]
            for name, product in zip(owners, products.nan_to_num(0.0, 0.0).amax(0).tolist(), strict=True):
                reach[name] = max(reach.get(name, 0.0), product)
            totals = norms.norm(dim=1).tolist()
            gradients += [(*entry[:1], owners, *entry[1:]) for entry in zip(block.steps, norms, totals, strict=True)]
        trainable = {names[key] for key in self._trainable}
        self._begin()
        limits = min(rates, default=math.inf), max(rates, default=0.0)
        return TakenRecords(losses, sorted(gradients, key=lambda entry: entry[0]), reach, trainable, limits)
