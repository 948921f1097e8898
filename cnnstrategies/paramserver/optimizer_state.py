"""An optimizer's state over slices, and as one process would have it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.optimizers import StateValue, tupled
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification


def join_state(
    specification: Specification,
    slices: Sequence[Slice],
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
        groups.append({**{name: tupled(value) for name, value in values.items()}, "params": members})
    return {"state": state, "param_groups": groups}


def _join(
    shape: tuple[int, ...], parts: Sequence[Slice], states: Mapping[int, Mapping[str, StateValue]]
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
    specification: Specification, slices: Sequence[Slice], state_dict: Mapping[str, Any]
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


def _part(name: str, value: StateValue, slice_: Slice, shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[slice_.start : slice_.stop].reshape(slice_.shape).clone()
