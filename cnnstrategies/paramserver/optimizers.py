"""The user's torch optimizer on slices."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError

# Each element's update depends on that element's gradients only, so a part of a tensor can be updated by itself.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
StateValue = Tensor | float | int | bool | None
ALL_THERE: Mapping[int, int] = MappingProxyType({})  # No slice lacks the gradient of a part.


def load_optimizer(path: str) -> type[Optimizer]:
    """The optimizer class with a class path.

    Raises:
        ConfigurationError: There is none, or it needs a closure.
    """
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise ConfigurationError(
            f"optimizer {path}: the server cannot import it; define it in a module, not in a script or a function"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigurationError(f"optimizer {path} is not a torch.optim.Optimizer: name one")
    if issubclass(kind, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigurationError(
            f"optimizer {path} needs the loss again or sparse gradients, which servers do not have: use SGD, AdamW or "
            "another one"
        )
    return kind


def is_elementwise(path: str) -> bool:
    """Whether an optimizer may work on parts of a tensor: true of torch's that are known to."""
    return _is_known(load_optimizer(path))


def _is_known(kind: type[Optimizer]) -> bool:
    return any(kind is getattr(torch.optim, name) for name in _ELEMENTWISE)


class SharedOptimizer:
    """The user's optimizer on some slices of a parameter group.

    Those that are updated together cost one call of its ``step``, whose fixed costs outweigh a small slice's own. Where
    the user leaves open which of torch's implementations is used it is the fused one, which reads and writes memory
    once: on one core 1.5 (SGD with momentum) to 2.4 times (Adam) as fast for a slice of 2 MiB, more for small ones.

    A slice of several small parameters is one tensor here, until a gradient comes that some of them have no part in:
    from then on each has a state of its own.

    Args:
        kind: Its class.
        values: The slices' values by key; updated in place.
        sizes: Elements of each of a slice's parts.
        options: The group's hyper-parameters.

    Attributes:
        optimizer: torch's.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        values: Mapping[int, Tensor],
        sizes: Mapping[int, Sequence[int]],
        options: Mapping[str, Any],
    ) -> None:
        self._values = values
        self._sizes = sizes
        self._parts = {key: [_parameter(value)] for key, value in values.items()}
        parameters = [part for parts in self._parts.values() for part in parts]
        # A group may hold options that the constructor does not take: a scheduler's initial_lr, for example.
        accepted = inspect.signature(kind).parameters
        arguments = {name: tupled(value) for name, value in options.items() if name in accepted}
        self._is_fused = (
            _is_known(kind)
            and "fused" in accepted
            and options.get("fused") is None
            and options.get("foreach") is None
            and not (options.get("capturable") or options.get("differentiable"))
            and all(parameter.is_floating_point() for parameter in parameters)
        )
        if self._is_fused:
            arguments["fused"] = True
        self.optimizer = kind(parameters, **arguments)

    def step(
        self, gradients: Mapping[int, Tensor], options: Mapping[str, Any], absent: Mapping[int, int] = ALL_THERE
    ) -> None:
        """One update of some slices, with the given hyper-parameters.

        Args:
            gradients: By slice.
            options: Of the group.
            absent: The parts of slices that have no gradient, as bits; they stay as they are.
        """
        parts: list[tuple[nn.Parameter, Tensor]] = []
        for key, gradient in gradients.items():
            lacking = absent.get(key, 0)
            if lacking and len(self._parts[key]) == 1:
                self._divide(key)
            own = self._parts[key]
            if len(own) == 1:
                parts.append((own[0], gradient))
                continue
            for place, one in enumerate(gradient.view(-1).split_with_sizes(self._sizes[key])):
                if not lacking >> place & 1:
                    parts.append((own[place], one))
        group = self.optimizer.param_groups[0]
        group.update((name, tupled(option)) for name, option in options.items())
        if self._is_fused:
            group["fused"] = True
            # A fused step of SGD takes either first gradients or later ones.
            state = self.optimizer.state
            first = [one for one in parts if all(value is None for value in state.get(one[0], {}).values())]
            if 0 < len(first) < len(parts):
                self._step(first)
                begun = {id(parameter) for parameter, _ in first}
                parts = [one for one in parts if id(one[0]) not in begun]
        self._step(parts)

    def _step(self, parts: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, gradient in parts:
            parameter.grad = gradient.view(parameter.shape)
        self.optimizer.step()
        for parameter, _ in parts:
            parameter.grad = None

    def _divide(self, key: int) -> None:
        """Give each part of a slice a state of its own, as it is now."""
        sizes, (whole,) = self._sizes[key], self._parts[key]
        parts = [_parameter(value) for value in self._values[key].split_with_sizes(sizes)]
        for name, value in self.optimizer.state.pop(whole, {}).items():
            for part, own in zip(parts, parts_of(value, sizes), strict=True):
                self.optimizer.state[part][name] = own
        self._exchange(key, parts)

    def _exchange(self, key: int, parts: list[nn.Parameter]) -> None:
        group, gone = self.optimizer.param_groups[0], {id(part) for part in self._parts[key]}
        group["params"] = [one for one in group["params"] if id(one) not in gone] + parts
        self._parts[key] = parts

    def state(self, key: int) -> dict[str, StateValue]:
        """A slice's state by name; tensors of the slice's shape, or scalars.

        Where its parts have states of their own, the name begins with the part's number.
        """
        parts = self._parts[key]
        return {
            named(name, place) if len(parts) > 1 else name: value
            for place, part in enumerate(parts)
            for name, value in self.optimizer.state.get(part, {}).items()
        }

    def clear_state(self, key: int) -> None:
        """Forget a slice's state."""
        for part in self._parts[key]:
            self.optimizer.state.pop(part, None)
        if len(self._parts[key]) > 1:
            self._exchange(key, [_parameter(self._values[key])])

    def set_state(self, key: int, name: str, value: StateValue) -> None:
        """Replace one part of a slice's state.

        Raises:
            ValueError: The slice has no such part.
        """
        place, plain = of_part(name)
        if place is None and len(self._parts[key]) > 1:
            self.clear_state(key)
        elif place is not None and not (0 <= place < len(self._sizes[key]) > 1):
            raise ValueError(f"a state of part {place} of {len(self._sizes[key])}")
        elif place is not None and len(self._parts[key]) == 1:
            self._divide(key)
        self.optimizer.state[self._parts[key][place or 0]][plain] = value


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=value.is_floating_point())


def parts_of(value: StateValue, sizes: Sequence[int]) -> list[StateValue]:
    """What each part of a slice has of a part of its state.

    Args:
        value: A tensor of as many elements as the slice, or what all of them have in common.
        sizes: Elements of each part.
    """
    if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == sum(sizes):
        return [part.clone() for part in value.split_with_sizes(sizes)]
    return [value.clone() if isinstance(value, Tensor) else value for _ in sizes]


def named(name: str, place: int) -> str:
    """The name of a part's own state."""
    return f"{place}/{name}"


def of_part(name: str) -> tuple[int | None, str]:
    """Whose state a name is of: of which part, or None for the whole slice; and what is left of it."""
    place, slash, plain = name.partition("/")
    return (int(place), plain) if slash else (None, name)


def tupled(option: Any) -> Any:
    """Betas are a tuple; JSON made a list of them."""
    return tuple(option) if isinstance(option, list) else option
