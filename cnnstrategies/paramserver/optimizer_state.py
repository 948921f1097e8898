"""An optimizer's state over slices, as messages, and as one process would have it.

Each part of a slice has a state of its own, whose names begin with the part's place: ``0/momentum_buffer``.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import as_bytes, from_bytes
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import StateValue, tupled
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.paramserver.specification import Specification

LARGEST_NAME = 64
MOST_STATES = 32  # of a part
MOST_DIMENSIONS = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


def named(name: str, place: int) -> str:
    """The name in a slice's state of a part's own."""
    return f"{place}/{name}"


def of_part(name: str) -> tuple[int, str]:
    """The inverse of :func:`named`: the part's place and its own name."""
    place, _, own = name.partition("/")
    return int(place), own


def join_state(
    specification: Specification,
    slices: Sequence[Slice],
    states: Mapping[int, Mapping[str, StateValue]],
    options: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The state dict over whole parameters, as the optimizer of one process would save it.

    `states` has that of each slice by key, and `options` each parameter group's hyper-parameters.
    """
    found: dict[int, list[tuple[Part, dict[str, StateValue]]]] = {}
    for slice_ in slices:
        own: list[dict[str, StateValue]] = [{} for _ in slice_.parts]
        for name, value in states[slice_.key].items():
            place, plain = of_part(name)
            own[place][plain] = value
        for part, state_of_part in zip(slice_.parts, own, strict=True):
            found.setdefault(part.parameter, []).append((part, state_of_part))
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
    return {
        slice_.key: {
            named(name, place): _cut(name, value, part, specification.parameters[part.parameter].shape)
            for place, part in enumerate(slice_.parts)
            for name, value in state_dict["state"].get(at[part.parameter], {}).items()
        }
        for slice_ in slices
    }


def _cut(name: str, value: StateValue, part: Part, shape: tuple[int, ...]) -> StateValue:
    if not isinstance(value, Tensor):
        return value
    if value.shape != shape or name == "step":
        return value.clone()
    return value.reshape(-1)[part.start : part.stop].reshape(part.shape).clone()


def pack_state(name: str, value: StateValue) -> tuple[dict[str, Any], bytes]:
    """The JSON object and the bytes for one entry of the state."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        described = {"name": name, "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        return described, bytes(as_bytes(plain))
    return {"name": name, "scalar": value}, b""


def unpack_state(described: dict[str, Any], raw: memoryview) -> tuple[str, StateValue]:
    """The inverse of :func:`pack_state`, on memory of its own."""
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
    """Refuse a state of a part that a slice does not have, and one beside more of them than it may have."""
    place, slash, _ = name.partition("/")
    if not (slash and place.isdecimal() and place.isascii() and int(place) < len(slice_.parts)):
        raise InvalidMessageError("a state of a part that its slice does not have")
    if name not in state and len(state) >= MOST_STATES * len(slice_.parts):
        raise InvalidMessageError("too many parts of a state")
