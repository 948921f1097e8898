"""An optimizer's state over slices, as messages, and as one process would have it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import as_bytes, from_bytes
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import StateValue, named, of_part, parts_of, tupled
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.paramserver.specification import Specification

LARGEST_NAME = 64
MOST_PARTS = 32
MOST_DIMENSIONS = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


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
    parts: dict[int, list[tuple[Part, dict[str, StateValue]]]] = {}
    for slice_ in slices:
        own: list[dict[str, StateValue]] = [{} for _ in slice_.parts]
        for name, value in states[slice_.key].items():
            place, plain = of_part(name)
            if place is not None:
                own[place][plain] = value
            elif len(own) == 1:
                own[0][name] = value
            else:
                for state_of_part, one in zip(own, parts_of(value, slice_.sizes), strict=True):
                    state_of_part[name] = one
        for part, found in zip(slice_.parts, own, strict=True):
            parts.setdefault(part.parameter, []).append((part, found))
    state: dict[int, dict[str, StateValue]] = {}
    groups = []
    position = 0
    for group, values in zip(specification.groups, options, strict=True):
        members = []
        for index in group.parameters:
            joined = _join(specification.parameters[index].shape, parts.get(index, []))
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
            joined[name] = torch.cat([_flat(state[name]) for _, state in parts]).view(shape)
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
        states = []
        for part in slice_.parts:
            shape = specification.parameters[part.parameter].shape
            saved = state_dict["state"].get(at[part.parameter], {})
            states.append({name: _part(name, value, part, shape) for name, value in saved.items()})
        together = _together(states, slice_)
        result[slice_.key] = together or {
            named(name, place): value for place, state in enumerate(states) for name, value in state.items()
        }
    return result


def _together(states: Sequence[Mapping[str, StateValue]], slice_: Slice) -> dict[str, StateValue]:
    """The state of a slice as a whole; nothing where its parts have made different numbers of steps."""
    joined: dict[str, StateValue] = {}
    if len(states) == 1 or any(state.keys() != states[0].keys() for state in states):
        return dict(states[0]) if len(states) == 1 else {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if all(_is_own(value, part) for value, part in zip(values, slice_.parts, strict=True)) and name != "step":
            joined[name] = torch.cat([_flat(value) for value in values])
        elif all(_equal(value, first) for value in values):
            joined[name] = first
        else:
            return {}
    return joined


def _is_own(value: StateValue, part: Part) -> bool:
    return isinstance(value, Tensor) and value.shape == part.shape


def _equal(one: StateValue, other: StateValue) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _part(name: str, value: StateValue, part: Part, shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[part.start : part.stop].reshape(part.shape).clone()


def pack_state(name: str, value: StateValue) -> tuple[dict[str, Any], bytes]:
    """The JSON object and the bytes for one part of the state."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        described = {"name": name, "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        return described, bytes(as_bytes(plain))
    return {"name": name, "scalar": value}, b""


def unpack_state(described: dict[str, Any], raw: memoryview) -> tuple[str, StateValue]:
    """The inverse of :func:`pack_state`, on memory of its own.

    Raises:
        InvalidMessageError: It describes nothing that fits the bytes.
    """
    name = described.get("name")
    if not isinstance(name, str) or len(name) > LARGEST_NAME:
        raise InvalidMessageError("a state without a name")
    if "scalar" in described:
        scalar = described["scalar"]
        if raw or not (scalar is None or isinstance(scalar, bool | int | float)):
            raise InvalidMessageError("a state that is no scalar")
        return name, scalar
    dtype, shape = _DTYPES.get(str(described.get("dtype"))), described.get("shape")
    if dtype is None or not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise InvalidMessageError("a state of unknown dtype or shape")
    numel = 1
    for size in shape:
        if type(size) is not int or not 0 <= size <= len(raw):
            raise InvalidMessageError("a state of unknown dtype or shape")
        numel *= size
    if numel * dtype.itemsize != len(raw):
        raise InvalidMessageError("a state whose bytes do not fit its shape")
    return name, from_bytes(raw, dtype).clone().view(shape)


def check_part(name: str, state: Collection[str], slice_: Slice) -> None:
    """Refuse a part of a slice's state that it does not have, and one beside more of them than it has.

    Raises:
        InvalidMessageError: So it is.
    """
    place, slash, _ = name.partition("/")  # See `optimizers.named`.
    if slash and not (place.isdecimal() and place.isascii() and int(place) < len(slice_.parts) > 1):
        raise InvalidMessageError("a state of a part that its slice does not have")
    if name not in state and len(state) >= MOST_PARTS * len(slice_.parts):
        raise InvalidMessageError("too many parts of a state")
