"""Conversion of an optimizer's state between slices, bytes and the state dict of a single process."""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.codec import CodecError, from_bytes, to_bytes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import StateValue, restored_option
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.paramserver.specification import Specification

SliceState = list[dict[str, StateValue]]
"""Optimizer state of a slice: for each part of the slice, a dictionary of values such as a momentum buffer."""


def join_state(
    specification: Specification,
    slices: Sequence[Slice],
    states: Mapping[int, SliceState],
    options: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Join the states of all slices into the state dict that the optimizer of a single process would save.

    Args:
        specification: The run's specification.
        slices: All slices.
        states: The optimizer state of each slice, by key.
        options: Hyperparameters of each parameter group.
    """
    parts: dict[int, list[tuple[Part, dict[str, StateValue]]]] = {}
    for slice_ in slices:
        for part, part_state in zip(slice_.parts, states[slice_.key], strict=True):
            parts.setdefault(part.parameter, []).append((part, part_state))
    state: dict[int, dict[str, StateValue]] = {}
    groups = []
    position = 0
    for group, values in zip(specification.groups, options, strict=True):
        members = []
        for index in group.parameters:
            joined = _join_parts(specification.parameters[index].shape, parts.get(index, []))
            if joined:
                state[position] = joined
            members.append(position)
            position += 1
        groups.append({**{name: restored_option(value) for name, value in values.items()}, "params": members})
    return {"state": state, "param_groups": groups}


def _join_parts(
    shape: tuple[int, ...], parts: Sequence[tuple[Part, Mapping[str, StateValue]]]
) -> dict[str, StateValue]:
    joined: dict[str, StateValue] = {}
    for name, first in (parts[0][1] if parts else {}).items():
        if isinstance(first, Tensor) and first.shape == parts[0][0].shape:
            joined[name] = torch.cat([torch.as_tensor(state[name]).reshape(-1) for _, state in parts]).view(shape)
        else:
            joined[name] = first
    return joined


def renumber_state(
    state: Mapping[int, dict[str, StateValue]], names: Sequence[str], new_names: Sequence[str]
) -> dict[int, dict[str, StateValue]]:
    """Return the states in an optimizer's state dict for an optimizer that holds its parameters in another order.

    Args:
        state: The state of each parameter. The keys are positions in `names`.
        names: Names of the parameters for which there may be a state.
        new_names: Names of the parameters of the other optimizer, which may have more parameters.

    Returns:
        The state of each parameter that has one. The keys are positions in `new_names`.
    """
    states = {names[position]: values for position, values in state.items()}
    return {position: states[name] for position, name in enumerate(new_names) if name in states}


def cut_state(
    specification: Specification, slices: Sequence[Slice], state_dict: Mapping[str, Any]
) -> dict[int, SliceState]:
    """Cut the optimizer's state dict of a single process into the states of the slices.

    This is the inverse of :func:`join_state`.

    Returns:
        The optimizer state of each slice, by key.

    Raises:
        ConfigurationError: The numbers of parameters in the state dict's parameter groups differ from the numbers in
            the specification's parameter groups.
    """
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    if sizes != [len(group.parameters) for group in specification.groups]:
        raise ConfigurationError(
            f"the optimizer's state has parameter groups with {sizes} parameters, but the optimizer has groups with "
            f"{[len(group.parameters) for group in specification.groups]}: load a state of the same model and optimizer"
        )
    position_of = {
        index: position
        for group, saved_group in zip(specification.groups, state_dict["param_groups"], strict=True)
        for index, position in zip(group.parameters, saved_group["params"], strict=True)
    }
    return {
        slice_.key: [
            {
                name: _cut_value(name, value, part, specification.parameters[part.parameter].shape)
                for name, value in state_dict["state"].get(position_of[part.parameter], {}).items()
            }
            for part in slice_.parts
        ]
        for slice_ in slices
    }


def _cut_value(name: str, value: StateValue, part: Part, shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[part.start : part.stop].reshape(part.shape).clone()


def pack_state(state: SliceState) -> bytes:
    """Encode the optimizer's state of a slice as bytes. An empty state is encoded as an empty byte string."""
    return to_bytes(state) if any(state) else b""


def unpack_state(raw: memoryview, slice_: Slice) -> SliceState:
    """Decode the optimizer's state of a slice from bytes that :func:`pack_state` returned. The tensors are copies.

    Raises:
        InvalidMessageError: The bytes are not a valid state of this slice.
    """
    if not raw:
        return [{} for _ in slice_.parts]
    try:
        state = from_bytes(bytes(raw))
    except CodecError:
        raise InvalidMessageError("the optimizer's state cannot be decoded") from None
    if not isinstance(state, list) or len(state) != len(slice_.parts) or not all(map(_is_state, state)):
        raise InvalidMessageError("the optimizer's state does not match the parts of its slice")
    return state


def _is_state(part_state: Any) -> bool:
    if not isinstance(part_state, dict):
        return False
    return all(isinstance(name, str) and _is_state_value(value) for name, value in part_state.items())


def _is_state_value(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_state_value, value.values()))
    if isinstance(value, list | tuple | deque):
        return all(map(_is_state_value, value))
    return value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.is_cpu)


def split_state(raw: memoryview, slice_: Slice, count: int = 1) -> tuple[SliceState, memoryview]:
    """Split a payload into an optimizer state and the tensors that follow the state.

    Args:
        raw: The payload.
        slice_: The slice.
        count: Number of tensors after the state; each of them has the size of the slice.

    Returns:
        A pair of the decoded state and a view of the tensors' bytes.

    Raises:
        InvalidMessageError: The payload is too short, or does not begin with a valid state of this slice.
    """
    start = len(raw) - count * slice_.nbytes
    if start < 0:
        raise InvalidMessageError("the payload is too short for its slice")
    return unpack_state(raw[:start], slice_), raw[start:]
