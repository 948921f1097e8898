"""One part of a slice's optimizer state as a message."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes, from_bytes
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.optimizers import StateValue
from cnnstrategies.paramserver.slicing import Slice

LARGEST_NAME = 64
MOST_PARTS = 32
MOST_DIMENSIONS = 8
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


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
