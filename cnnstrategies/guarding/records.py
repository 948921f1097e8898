"""Losses, gradient norms, learning rates and requirements of gradients in the steps since the last check.

Nothing is read from a device before :meth:`StepRecords.take`, because a read makes the CPU wait for its device.

On the CPU an operation for each of many gradients takes longer than everything else that is recorded. There, each step
measures some of the gradients, in turns. A wrong batch or loss shows in the gradients of all turns. Other errors of a
step between two turns leave traces: a gradient that is not finite makes weights and the next loss not finite, and the
optimizer's moving average of the gradients keeps a large one, so the average is measured in place of the gradient.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._torch_private import norms_of
from cnnstrategies.recording.steps import StepReader

TURNS = 4  # Number of steps in which each gradient is measured once, if there are many.
LEAST = 8  # Smallest number of gradients in a turn.
AVERAGES = ("momentum_buffer", "exp_avg")  # Names of an optimizer's moving average of gradients.


@dataclass
class GradientBlock:
    """Gradients of the same parameters in some steps of an optimizer.

    Attributes:
        turn: Number of the turn in which these gradients are measured.
        owners: Ids of the parameters.
        groups: Index of the optimizer's group of each parameter.
        steps: Numbers of the steps.
        rates: Learning rates of the optimizer's groups in each step.
        norms: Norms of the gradients in each step.
    """

    turn: int
    owners: list[int]
    groups: list[int]
    steps: list[int] = field(default_factory=list)
    rates: list[list[float | Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class GradientNorms:
    """Norms of the gradients that were measured in a step of an optimizer.

    Attributes:
        step: Number of the step.
        turn: Number of the turn, which other steps with the same parameters have as well.
        names: Names of the parameters.
        norms: Norms of their gradients (parameters).
        total: Norm of all of them.
    """

    step: int
    turn: int
    names: list[str]
    norms: Tensor
    total: float


@dataclass
class TakenRecords:
    """Values of the steps since the last check, on the host.

    Attributes:
        losses: Number of the step and loss of each batch whose loss is on this rank.
        gradients: Norms of gradients, in the order of the steps.
        reach: Largest product of a finite norm and the step's learning rate, for each parameter with a gradient.
        trainable: Names of the parameters that have required a gradient at any time since the last check.
        rates: Smallest and largest learning rate of all optimizers' groups.
        wrong_weights: Names of the parameters that were not finite when a loss was not finite for the first time.
    """

    losses: list[tuple[int, float]]
    gradients: list[GradientNorms]
    reach: dict[str, float]
    trainable: set[str]
    rates: tuple[float, float]
    wrong_weights: list[str]

    def norms(self, turn: int | None = None) -> list[tuple[int, float]]:
        """Return the number of each step, and the norm of all gradients of the step; of a turn, or of all turns."""
        return [(each.step, each.total) for each in self.gradients if turn in (None, each.turn)]

    def at(self, step: int) -> dict[str, float]:
        """Return the norms of the gradients of a step by parameter."""
        pairs = (zip(each.names, each.norms.tolist(), strict=True) for each in self.gradients if each.step == step)
        return {name: norm for each in pairs for name, norm in each}


class StepRecords(StepReader):
    """Reader that keeps figures of steps.

    Args:
        module: The module that is trained.
        is_held: Function that tells whether this rank has the values of a tensor.
        has_states: Whether this rank has the states of the optimizers.
    """

    def __init__(self, module: nn.Module, is_held: Callable[[Tensor], bool], has_states: bool) -> None:
        self._is_held, self._has_states = is_held, has_states
        self._reads_loss = False  # Whether losses are read before the backward pass.
        self._made: dict[int, int] = {}  # Number of recorded steps of each optimizer.
        self._begin(dict(module.named_parameters()))

    def _begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._named = parameters
        self._losses: list[tuple[int, float | Tensor]] = []
        self._wrong_weights: list[str] | None = None
        self._frozen = list(self._named.values())  # Parameters that have not required a gradient so far.
        self._trainable: set[int] = set()
        self._turns: dict[int, tuple[list[int], list[_Turn]]] = {}  # With the lengths of an optimizer's groups.
        self._blocks: dict[Any, GradientBlock] = {}

    def _observe(self) -> None:
        """Record which parameters require a gradient now. Code may change this within a step."""
        if self._frozen:
            self._trainable.update(id(parameter) for parameter in self._frozen if parameter.requires_grad)
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]

    @override
    def before_backward(self, loss: Any) -> None:
        """Look at the weights if a loss is not finite for the first time, before the step makes all weights wrong."""
        self._observe()
        if type(loss) is Tensor and loss.device.type == "cpu" and loss.numel() == 1 and self._is_held(loss):
            self._reads_loss = True
            if self._wrong_weights is None and not math.isfinite(loss.item()):
                held = {name: value for name, value in self._named.items() if self._is_held(value)}
                self._wrong_weights = [name for name, value in held.items() if not value.detach().isfinite().all()]

    @override
    def before_step(self, optimizer: Optimizer) -> None:
        """Record the norms of gradients with which an optimizer makes a step."""
        self._observe()
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        known = self._turns.get(id(optimizer))
        if known is None or known[0] != lengths:
            known = self._turns[id(optimizer)] = lengths, self._turns_of(optimizer)
        turns = known[1]
        made = self._made[id(optimizer)] = self._made.get(id(optimizer), -1) + 1
        turn = turns[made % len(turns)]
        values = [_measured(*each) for each in zip(turn.parameters, turn.averages, strict=True)]
        dense = [value for value in values if value is not None]
        if not dense:
            return
        have = None if len(dense) == len(values) else tuple(value is not None for value in values)
        key = (id(optimizer), *lengths, turn.number, have)
        if (block := self._blocks.get(key)) is None:
            owners = [id(parameter) for parameter in turn.parameters]
            each = [True] * len(owners) if have is None else have
            block = GradientBlock(turn.number, [*compress(owners, each)], [*compress(turn.groups, each)])
            self._blocks[key] = block
        rates = (group.get("lr", 0.0) for group in optimizer.param_groups)
        block.steps.append(self.step)
        block.rates.append([rate.clone() if isinstance(rate, Tensor) else rate for rate in rates])
        block.norms.append(norms_of(dense))

    def _turns_of(self, optimizer: Optimizer) -> list["_Turn"]:
        """Return the turns of an optimizer's parameters that have values on this rank."""
        held = [
            (parameter, index)
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.is_floating_point() and self._is_held(parameter)
        ]
        is_slow = self._reads_loss and all(parameter.device.type == "cpu" for parameter, _ in held)
        count = max(1, min(TURNS, len(held) // LEAST)) if is_slow else 1
        states: Any = optimizer.state if self._has_states and count > 1 else {}
        turns = [_Turn(number, [], [], []) for number in range(count)]
        for place, (parameter, index) in enumerate(held):
            turn = turns[place % count]
            turn.parameters.append(parameter)
            turn.groups.append(index)
            turn.averages.append(_average(states.get(parameter, {})))
        return turns

    @override
    def end_batch(self, loss: Any) -> None:
        """Record the loss of a batch, if it is a number that this rank has."""
        self._observe()
        if type(loss) is Tensor and loss.numel() == 1 and loss.layout is torch.strided and self._is_held(loss):
            on_host = loss.device.type == "cpu"
            value = loss.item() if on_host else loss.detach().reshape(()).to(torch.float32, copy=True)
            self._losses.append((self.step, value))

    def take(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, nn.Parameter]) -> TakenRecords:
        """Return the records since the last call, and begin again.

        Args:
            optimizers: The optimizers.
            parameters: The module's parameters from now on, by their names.
        """
        self._observe()
        names = {id(parameter): name for name, parameter in self._named.items()}
        on_device = [loss for _, loss in self._losses if isinstance(loss, Tensor)]
        read = iter(torch.stack(on_device).tolist() if on_device else ())  # One read from the device.
        losses = [(step, next(read) if isinstance(loss, Tensor) else loss) for step, loss in self._losses]
        gradients, reach = list[GradientNorms](), dict[str, float]()
        rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
        for block in self._blocks.values():
            norms = torch.stack(block.norms).cpu().double()
            per_group = torch.tensor([[float(rate) for rate in row] for row in block.rates], dtype=torch.float64)
            rates += [float(per_group.min()), float(per_group.max())]
            products = norms * per_group[:, block.groups]
            owners = [names.get(owner, "a parameter outside of the module") for owner in block.owners]
            for name, product in zip(owners, products.nan_to_num(0.0, 0.0).amax(0).tolist(), strict=True):
                reach[name] = max(reach.get(name, 0.0), product)
            totals = norms.norm(dim=1).tolist()
            for step, row, total in zip(block.steps, norms, totals, strict=True):
                gradients.append(GradientNorms(step, block.turn, owners, row, total))
        trainable, wrong = {names[key] for key in self._trainable}, self._wrong_weights or []
        self._begin(parameters)
        limits = min(rates, default=math.inf), max(rates, default=0.0)
        return TakenRecords(losses, sorted(gradients, key=lambda each: each.step), reach, trainable, limits, wrong)


@dataclass(frozen=True)
class _Turn:
    """Parameters of an optimizer that are measured in the same steps.

    Attributes:
        number: Number of the turn.
        parameters: The parameters.
        groups: Index of the optimizer's group of each parameter.
        averages: State of each parameter and the name of the average in it; None if the gradient is measured.
    """

    number: int
    parameters: list[nn.Parameter]
    groups: list[int]
    averages: list[tuple[Mapping[str, Any], str] | None]


def _average(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
    return next(((state, name) for name in AVERAGES if isinstance(state.get(name), Tensor)), None)


def _measured(parameter: nn.Parameter, average: tuple[Mapping[str, Any], str] | None) -> Tensor | None:
    """Return the gradient of a parameter, or its average; None without a dense gradient."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return None
    value = gradient if average is None else average[0].get(average[1])
    return value if isinstance(value, Tensor) else gradient
