"""An optimizer's state over slices, as bytes, and as one process would have it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.codec import CodecError, from_bytes, to_bytes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import StateValue, tupled
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.paramserver.specification import Specification

SliceState = list[dict[str, StateValue]]
"""Of each part of a slice."""


def join_state(
    specification: Specification,
    slices: Sequence[Slice],
    states: Mapping[int, SliceState],
    options: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The state dict over whole parameters, as the optimizer of one process would save it.

    `states` has that of each slice by key, and `options` each parameter group's hyper-parameters.
    """
    found: dict[int, list[tuple[Part, dict[str, StateValue]]]] = {}
    for slice_ in slices:
        for part, own in zip(slice_.parts, states[slice_.key], strict=True):
            found.setdefault(part.parameter, []).append((part, own))
    state: dict[int, dict[str, StateValue]] = {}
    groups = []
    position = 0
    for group, values in zip(specification.groups, options, strict=True):
        members = []
        for index in group.parameters:
            joined = _join(specification.parameters[index].shape, found.get(index, []))
            if joined:
                state[position] = joined
            members.append(position)
            position += 1
        groups.append({**{name: tupled(value) for name, value in values.items()}, "params": members})
    return {"state": state, "param_groups": groups}


def _join(shape: tuple[int, ...], parts: Sequence[tuple[Part, Mapping[str, StateValue]]]) -> dict[str, StateValue]:
    joined: dict[str, StateValue] = {}
    for name, first in (parts[0][1] if parts else {}).items():
        if isinstance(first, Tensor) and first.shape == parts[0][0].shape:
            joined[name] = torch.cat([torch.as_tensor(state[name]).reshape(-1) for _, state in parts]).view(shape)
        else:
            joined[name] = first
    return joined


def cut_state(
    specification: Specification, slices: Sequence[Slice], state_dict: Mapping[str, Any]
) -> dict[int, SliceState]:
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
    return {
        slice_.key: [
            {
                name: _cut(name, value, part, specification.parameters[part.parameter].shape)
                for name, value in state_dict["state"].get(at[part.parameter], {}).items()
            }
            for part in slice_.parts
        ]
        for slice_ in slices
    }


def _cut(name: str, value: StateValue, part: Part, shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[part.start : part.stop].reshape(part.shape).clone()


def pack_state(state: SliceState) -> bytes:
    """A slice's state as bytes; none where there is none."""
    return to_bytes(state) if any(state) else b""


def unpack_state(raw: memoryview, slice_: Slice) -> SliceState:
    """The inverse of :func:`pack_state`, on memory of its own."""
    if not raw:
        return [{} for _ in slice_.parts]
    try:
        state = from_bytes(bytes(raw))
    except CodecError:
        raise InvalidMessageError("a state that is none") from None
    if not isinstance(state, list) or len(state) != len(slice_.parts) or not all(map(_is_state, state)):
        raise InvalidMessageError("a state of other parts than its slice has")
    return state


def _is_state(own: Any) -> bool:
    if not isinstance(own, dict):
        return False
    return all(
        isinstance(name, str)
        and (value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.is_cpu))
        for name, value in own.items()
    )


def split_state(raw: memoryview, slice_: Slice, count: int = 1) -> tuple[SliceState, memoryview]:
    """The state that stands before the elements of a slice, or of several like it, and the bytes of these."""
    start = len(raw) - count * slice_.nbytes
    if start < 0:
        raise InvalidMessageError("a payload of another size than its slice needs")
    return unpack_state(raw[:start], slice_), raw[start:]
