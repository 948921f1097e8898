"""The user's torch optimizer on slices, and its state as one process would have it."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError

if TYPE_CHECKING:
    from cnnstrategies.paramserver.slicing import Slice
    from cnnstrategies.paramserver.specification import Specification

# Each element's update depends on that element's gradients only, so a part of a tensor can be updated by itself.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
StateValue = Tensor | float | int | bool | None


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
    """Whether an optimizer may work on parts of a tensor: true of those of torch.optim that are known to."""
    kind = load_optimizer(path)
    return any(kind is getattr(torch.optim, name) for name in _ELEMENTWISE)


class SharedOptimizer:
    """The user's optimizer on some slices of a parameter group.

    Those that are updated together cost one call of its ``step``, whose fixed costs outweigh a small slice's own.

    Args:
        kind: Its class.
        values: The slices' values by key; updated in place.
        options: The group's hyper-parameters.
    """

    def __init__(self, kind: type[Optimizer], values: Mapping[int, Tensor], options: Mapping[str, Any]) -> None:
        self._parameters = {
            key: nn.Parameter(value, requires_grad=value.is_floating_point()) for key, value in values.items()
        }
        # A group may hold options that the constructor does not take: a scheduler's initial_lr, for example.
        accepted = inspect.signature(kind).parameters
        arguments = {name: _tupled(value) for name, value in options.items() if name in accepted}
        self._optimizer = kind(list(self._parameters.values()), **arguments)

    def step(self, gradients: Mapping[int, Tensor], options: Mapping[str, Any]) -> None:
        """One update of some slices, with the given hyper-parameters."""
        self._optimizer.param_groups[0].update((name, _tupled(option)) for name, option in options.items())
        updated = [self._parameters[key] for key in gradients]
        for parameter, gradient in zip(updated, gradients.values(), strict=True):
            parameter.grad = gradient.view(parameter.shape)
        self._optimizer.step()
        for parameter in updated:
            parameter.grad = None

    def state(self, key: int) -> dict[str, StateValue]:
        """A slice's state by name; tensors of the slice's shape, or scalars."""
        return dict(self._optimizer.state.get(self._parameters[key], {}))

    def set_state(self, key: int, name: str, value: StateValue) -> None:
        """Replace one part of a slice's state."""
        self._optimizer.state[self._parameters[key]][name] = value


def _tupled(option: Any) -> Any:
    """Betas are a tuple; JSON made a list of them."""
    return tuple(option) if isinstance(option, list) else option


def join_state(
    specification: "Specification",
    slices: Sequence["Slice"],
    states: Mapping[int, Mapping[str, StateValue]],
    options: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The state dict over whole parameters, as the optimizer of one process would save it.

    Args:
        specification: Names the parameters and groups.
        slices: All slices.
        states: Each slice's state by key.
        options: Each group's hyper-parameters.
    """
    parts: dict[int, list[Slice]] = {}
    for slice_ in slices:
        parts.setdefault(slice_.parameter, []).append(slice_)
    state: dict[int, dict[str, StateValue]] = {}
    groups = []
    position = 0
    for group, values in zip(specification.groups, options, strict=True):
        members = []
        for index in group.parameters:
            joined = _join(specification.parameters[index].shape, parts.get(index, []), states)
            if joined:
                state[position] = joined
            members.append(position)
            position += 1
        groups.append({**{name: _tupled(value) for name, value in values.items()}, "params": members})
    return {"state": state, "param_groups": groups}


def _join(
    shape: tuple[int, ...], parts: Sequence["Slice"], states: Mapping[int, Mapping[str, StateValue]]
) -> dict[str, StateValue]:
    joined: dict[str, StateValue] = {}
    for name, first in (states[parts[0].key] if parts else {}).items():
        if isinstance(first, Tensor) and first.shape == parts[0].shape:
            joined[name] = torch.cat([_flat(states[part.key][name]) for part in parts]).view(shape)
        else:
            joined[name] = first
    return joined


def _flat(value: StateValue) -> Tensor:
    assert isinstance(value, Tensor)
    return value.reshape(-1)


def cut_state(
    specification: "Specification", slices: Sequence["Slice"], state_dict: Mapping[str, Any]
) -> dict[int, dict[str, StateValue]]:
    """Each slice's part of a plain state dict: the inverse of :func:`join_state`.

    Raises:
        ConfigurationError: It is of an optimizer with other parameter groups.
    """
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group.parameters) for group in specification.groups]:
        raise ConfigurationError(
            f"the optimizer's state has parameter groups of sizes {sizes}, the specification's are "
            f"{[len(group.parameters) for group in specification.groups]}: load the state of the same model"
        )
    at = {
        index: place
        for group, saved in zip(specification.groups, state_dict["param_groups"], strict=True)
        for index, place in zip(group.parameters, saved["params"], strict=True)
    }
    result: dict[int, dict[str, StateValue]] = {}
    for slice_ in slices:
        shape = specification.parameters[slice_.parameter].shape
        saved = state_dict["state"].get(at[slice_.parameter], {})
        result[slice_.key] = {name: _part(name, value, slice_, shape) for name, value in saved.items()}
    return result


def _part(name: str, value: StateValue, slice_: "Slice", shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[slice_.start : slice_.stop].reshape(slice_.shape).clone()
