"""Losses, gradient norms, learning rates and requirements of gradients in the steps since the last check.

Nothing is read on the host before :meth:`StepRecords.take`, because a read makes the CPU wait for its device.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._torch_private import norms_of


@dataclass
class ParameterRecord:
    """Gradients of one parameter in the optimizer's steps since the last check.

    Attributes:
        steps: Numbers of the steps for which the parameter had a gradient.
        norms: Norms of the gradient in these steps.
        reach: Largest product of a finite gradient's norm and the learning rate of the step.
    """

    steps: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    reach: float = 0.0


@dataclass
class TakenRecords:
    """Values of the steps since the last check, on the host.

    Attributes:
        losses: Loss of each batch by the number of its step, for batches with a loss on this rank.
        parameters: Records by the names of the parameters that had a gradient.
        trainable: Names of the parameters that have required a gradient at any time since the last check.
        rates: Smallest and largest learning rate of all optimizers' groups.
    """

    losses: list[tuple[int, float]]
    parameters: dict[str, ParameterRecord]
    trainable: set[str]
    rates: tuple[float, float]

    def norms(self) -> list[tuple[int, float]]:
        """Return the norm of all gradients of each step, by the number of the step."""
        squares: dict[int, float] = {}
        for record in self.parameters.values():
            for step, norm in zip(record.steps, record.norms, strict=True):
                squares[step] = squares.get(step, 0.0) + norm * norm
        return [(step, square**0.5) for step, square in sorted(squares.items())]


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
        self._names = {id(parameter): name for name, parameter in self._named.items()}
        self._losses: list[tuple[int, Tensor]] = []
        self._norms: list[tuple[int, list[int], list[float | Tensor], Tensor]] = []
        self._trainable: set[int] = set()

    def observe(self) -> None:
        """Record which parameters require a gradient now. Code may change this within a step."""
        if len(self._trainable) < len(self._named):
            self._trainable.update(id(parameter) for parameter in self._named.values() if parameter.requires_grad)

    def add_gradients(self, step: int, optimizer: Optimizer) -> None:
        """Record the norms of the gradients with which an optimizer makes a step."""
        self.observe()
        owners: list[int] = []
        rates: list[float | Tensor] = []
        gradients = []
        for group in optimizer.param_groups:
            rate = group.get("lr", 0.0)
            rate = rate.clone() if isinstance(rate, Tensor) else rate
            for parameter in group["params"]:
                gradient = parameter.grad if self._is_held(parameter) else None
                if gradient is not None and gradient.layout is torch.strided and gradient.is_floating_point():
                    owners.append(id(parameter))
                    rates.append(rate)
                    gradients.append(gradient)
        if gradients:
            self._norms.append((step, owners, rates, norms_of(gradients)))

    def add_loss(self, step: int, loss: object) -> None:
        """Record the loss of a batch, if it is a number that this rank has."""
        if type(loss) is Tensor and loss.numel() == 1 and loss.layout is torch.strided and self._is_held(loss):
            self._losses.append((step, loss.detach().reshape(()).to(torch.float32, copy=True)))

    def take(self, groups: Iterator[Mapping[str, float]]) -> TakenRecords:
        """Return the records since the last call, and begin again.

        Args:
            groups: Groups of all optimizers.
        """
        values = torch.stack([loss for _, loss in self._losses]).tolist() if self._losses else []
        losses = [(step, value) for (step, _), value in zip(self._losses, values, strict=True)]
        norms = torch.cat([norms for *_, norms in self._norms]).tolist() if self._norms else []
        parameters: dict[str, ParameterRecord] = {}
        position, all_rates = 0, [float(group["lr"]) for group in groups if "lr" in group]
        for step, owners, rates, _ in self._norms:
            floats = {id(rate): float(rate) for rate in rates}
            all_rates += set(floats.values())
            for owner, rate in zip(owners, rates, strict=True):
                norm, position = norms[position], position + 1
                record = parameters.setdefault(
                    self._names.get(owner, "a parameter outside of the module"), ParameterRecord()
                )
                record.steps.append(step)
                record.norms.append(norm)
                if norm < float("inf"):
                    record.reach = max(record.reach, norm * floats[id(rate)])
        self.observe()
        trainable = {self._names[key] for key in self._trainable if key in self._names}
        self._begin()
        return TakenRecords(losses, parameters, trainable, (min(all_rates, default=0.0), max(all_rates, default=0.0)))
