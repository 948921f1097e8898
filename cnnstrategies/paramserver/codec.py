"""Values as bytes and back, without pickle: JSON for the structure, raw buffers for the tensors.

Only plain data comes out of a message: nothing that is received can name a class or run code.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.core.node import Buffer

MAX_STRUCTURE = 16 << 20  # bytes of JSON
MAX_DEPTH = 40
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class CodecError(ValueError):
    """A value cannot be sent, or a message is not one that :func:`encode` made."""


def encode(value: Any) -> list[Buffer]:
    """Turn a value into message frames.

    Args:
        value: None, bool, int, float, str, ``Path``, tensor, or list, tuple, dict of them (dictionary keys: str,
            int, float, bool or None). Tensors are sent as contiguous CPU tensors.

    Returns:
        The structure as JSON, then one buffer per tensor.

    Raises:
        CodecError: The value holds something else.
    """
    buffers: list[Buffer] = []
    structure = json.dumps(_pack(value, buffers, 0), separators=(",", ":")).encode()
    if len(structure) > MAX_STRUCTURE:
        raise CodecError(f"a value of {len(structure)} bytes without its tensors is over the limit of {MAX_STRUCTURE}")
    return [structure, *buffers]


def decode(frames: Sequence[Buffer]) -> Any:
    """The value that :func:`encode` made frames of; tensors are copies on the CPU.

    Raises:
        CodecError: The frames do not fit together.
    """
    if not frames or len(frames[0]) > MAX_STRUCTURE:
        raise CodecError(f"a message of {len(frames)} frames does not begin with a structure that is small enough")
    try:
        packed = json.loads(bytes(frames[0]))
        return _unpack(packed, frames[1:], 0)
    except CodecError:
        raise
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CodecError(f"not a message of this codec: {type(error).__name__}: {error}") from error


def _pack(value: Any, buffers: list[Buffer], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a value nested more than {MAX_DEPTH} deep cannot be sent")
    if value is None or isinstance(value, (bool, int, str)):
        # Subclasses such as IntEnum or a string with methods arrive as what they are based on.
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["f", repr(float(value))]
    if isinstance(value, PurePath):
        return ["p", str(value)]
    if isinstance(value, Tensor):
        return _pack_tensor(value, buffers)
    if isinstance(value, dict):
        pairs = [[_pack_key(key), _pack(item, buffers, depth + 1)] for key, item in value.items()]
        return ["d", pairs]
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", [_pack(item, buffers, depth + 1) for item in value]]
    raise CodecError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent between processes: nothing is pickled; "
        "send numbers, strings, paths, tensors, or lists, tuples and dictionaries of them"
    )


def _pack_key(key: Any) -> Any:
    if key is None or isinstance(key, (bool, int, str)):
        return key
    if isinstance(key, float) and math.isfinite(key):
        return key
    raise CodecError(f"the dictionary key {key!r} cannot be sent: use a string or a number")


def _pack_tensor(value: Tensor, buffers: list[Buffer]) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES or value.layout != torch.strided:
        raise CodecError(
            f"a tensor of {value.dtype} and {value.layout} cannot be sent: make it dense and of a usual type"
        )
    tensor = value.detach().cpu().contiguous()
    buffers.append(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return ["x", len(buffers) - 1, name, list(tensor.shape)]


def _unpack(packed: Any, buffers: Sequence[Buffer], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a message nested more than {MAX_DEPTH} deep")
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    kind, rest = packed[0], packed[1:]
    if kind == "f":
        return float(rest[0])
    if kind == "p":
        return Path(rest[0])
    if kind == "d":
        return {key: _unpack(item, buffers, depth + 1) for key, item in rest[0]}
    if kind in ("l", "t"):
        items = [_unpack(item, buffers, depth + 1) for item in rest[0]]
        return items if kind == "l" else tuple(items)
    if kind == "x":
        return _unpack_tensor(buffers, *rest)
    raise CodecError(f"unknown kind of value {kind!r}")


def _unpack_tensor(buffers: Sequence[Buffer], index: Any, name: Any, shape: Any) -> Tensor:
    if type(index) is not int or not 0 <= index < len(buffers) or name not in DTYPES:
        raise CodecError(f"tensor {index!r} of type {name!r} in a message with {len(buffers)} buffers")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError(f"a tensor of shape {shape!r}")
    dtype = DTYPES[name]
    count, buffer = math.prod(shape), buffers[index]
    if len(buffer) != count * dtype.itemsize:
        raise CodecError(f"a tensor of shape {shape} and type {name} in {len(buffer)} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(buffer), dtype=dtype).reshape(shape)
