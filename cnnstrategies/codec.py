"""Values as bytes and back, without pickle: JSON for the structure, raw buffers for the tensors.

Only data comes out of a message: nothing that is received is imported, and no method of a user's class runs. A message
names the classes of records, and gets those alone that are loaded already: NamedTuples, dataclasses and what is
registered with torch's pytrees.
"""

import json
import math
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_structure, tree_unflatten

from cnnstrategies.errors import ConfigurationError

Buffer = bytes | bytearray | memoryview

MAX_STRUCTURE = 16 << 20  # bytes of JSON
MAX_DEPTH = 40
WORD = 8  # bytes of a length
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.uint64,
        torch.int32,
        torch.uint32,
        torch.int16,
        torch.uint16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
# What torch has one of, by its name.
CONSTANTS = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype | torch.memory_format)}
CONTAINERS = (dict, list, tuple)  # What is based on these, and no record, arrives as one of them.


class CodecError(ConfigurationError):
    """A value cannot be sent, or a message is not one that :func:`encode` made."""


def encode(value: Any) -> list[Buffer]:
    """Turn a value into message frames.

    Args:
        value: None, bool, int, float, str, ``Path``, tensor, array of numbers, type or device of torch's, or list,
            tuple, dict (keys: str, int, float, bool or None), NamedTuple, dataclass or registered node of a pytree of
            them. Tensors are sent as contiguous CPU tensors, and those of the meta device by shape and type.

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


def decode(frames: Sequence[Any]) -> Any:
    """The value that :func:`encode` made frames of; tensors are copies on the CPU.

    Args:
        frames: Buffers; after the first also tensors of bytes, which become the value's without a copy.

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
    except Exception as error:  # What a registered node is made with may raise any.
        raise CodecError(f"not a message of this codec: {type(error).__name__}: {error}") from error


def to_bytes(value: Any) -> bytes:
    """A value as one message, its frames with their lengths before them; see :func:`encode`."""
    frames = encode(value)
    return b"".join([struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames)), *frames])


def from_bytes(message: bytes) -> Any:
    """The value that :func:`to_bytes` made a message of.

    Raises:
        CodecError: It is none.
    """
    try:
        (count,) = struct.unpack_from("<Q", message)
        lengths = struct.unpack_from(f"<{min(count, len(message))}Q", message, WORD)
    except struct.error as error:
        raise CodecError(f"a message of {len(message)} bytes without the lengths of its parts") from error
    frames, start = [], WORD * (1 + count)
    for length in lengths:
        frames.append(message[start : start + length])
        start += length
    if start != len(message):
        raise CodecError(f"a message of {len(message)} bytes whose parts end at {start}")
    return decode(frames)


def _pack(value: Any, buffers: list[Buffer], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a value nested more than {MAX_DEPTH} deep cannot be sent")
    if value is None or isinstance(value, (bool, int, str)):
        # Subclasses such as IntEnum or a string with methods arrive as what they are based on.
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["f", repr(float(value))]
    if type(value) not in CONTAINERS and (packed := _pack_special(value, buffers, depth)) is not None:
        return packed
    if isinstance(value, dict):
        pairs = [[_pack_key(key), _pack(item, buffers, depth + 1)] for key, item in value.items()]
        return ["d", pairs]
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", [_pack(item, buffers, depth + 1) for item in value]]
    raise CodecError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent between processes: nothing is pickled; "
        "send numbers, strings, paths, tensors, arrays, or lists, tuples, dictionaries, NamedTuples and dataclasses of "
        "them"
    )


def _pack_special(value: Any, buffers: list[Buffer], depth: int) -> Any:
    if isinstance(value, PurePath):
        return ["p", str(value)]
    if isinstance(value, Tensor):
        return _pack_tensor(value, buffers)
    if isinstance(value, torch.dtype | torch.memory_format):
        return ["c", str(value)]
    if isinstance(value, torch.device):
        return ["v", str(value)]
    if isinstance(value, np.ndarray):
        return ["n", _pack_array(value, buffers)]
    if isinstance(value, np.generic):
        return _pack(value.item(), buffers, depth + 1)
    if isinstance(value, TreeSpec):  # By an example.
        return ["g", _pack(tree_unflatten(range(value.num_leaves), value), buffers, depth + 1)]
    if (record := _record(type(value))) is not None:
        return ["o", _name(type(value)), [_pack(part, buffers, depth + 1) for part in record.apart(value)]]
    return None


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
    if value.is_meta:
        return ["m", name, list(value.shape)]
    tensor = value.detach().cpu().contiguous()
    buffers.append(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return ["x", len(buffers) - 1, name, list(tensor.shape)]


def _pack_array(value: np.ndarray[Any, Any], buffers: list[Buffer]) -> Any:
    try:
        return _pack_tensor(torch.from_numpy(np.array(value, order="C")), buffers)
    except TypeError as error:
        raise CodecError(f"an array of {value.dtype} cannot be sent: make it one of numbers ({error})") from error


@dataclass(frozen=True)
class _Record:
    """How a value of a class is taken apart, and made of its parts without a method of its own."""

    apart: Callable[[Any], list[Any]]
    whole: Callable[[list[Any]], Any]


def _record(cls: type) -> _Record | None:
    """None for a class that is none of those that a message may name."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _Record(list, partial(_named_tuple, cls))
    if cls in SUPPORTED_NODES and cls not in (*CONTAINERS, defaultdict):  # The last holds a function.
        node = SUPPORTED_NODES[cls]
        return _Record(lambda value: list(node.flatten_fn(value)), lambda parts: node.unflatten_fn(*parts))
    if is_dataclass(cls) and not issubclass(cls, CONTAINERS):
        names = [field.name for field in fields(cls)]
        return _Record(lambda value: [getattr(value, name) for name in names], partial(with_fields, cls, names))
    return None


def _named_tuple(cls: type[tuple[Any, ...]], parts: list[Any]) -> Any:
    if len(parts) != len(cls._fields):  # type: ignore[attr-defined]
        raise CodecError(f"{len(parts)} fields for {_name(cls)}")
    return tuple.__new__(cls, parts)


def with_fields(cls: type, names: Sequence[str], parts: list[Any]) -> Any:
    """An instance of a dataclass, made without its own ``__init__``."""
    made: Any = object.__new__(cls)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


def _name(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if loaded_record(name) is not cls:
        raise CodecError(f"{name} cannot be sent between processes: define the class at the top of a module")
    return name


def loaded_record(name: str) -> type | None:
    """The class of a record that this process has loaded; nothing is imported, and no module's own code runs.

    Args:
        name: As in ``module:Outer.Record``.

    Returns:
        None where there is no such class, or it is none of a NamedTuple, a dataclass and a registered node.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return found if isinstance(found, type) and _record(found) is not None else None


def _unpack(packed: Any, buffers: Sequence[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a message nested more than {MAX_DEPTH} deep")
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    kind, rest = packed[0], packed[1:]
    if kind == "o":
        cls = loaded_record(rest[0])
        record = None if cls is None else _record(cls)
        if record is None:
            raise CodecError(
                f"a value of {rest[0]!r} has come, and no NamedTuple or dataclass of that name is loaded here: import "
                "its module on every rank"
            )
        return record.whole([_unpack(part, buffers, depth + 1) for part in rest[1]])
    if kind == "c":
        return CONSTANTS[rest[0]]
    if kind == "v":
        return torch.device(rest[0])
    if kind == "g":
        return tree_structure(_unpack(rest[0], buffers, depth + 1))
    if kind == "n":
        return _unpack(rest[0], buffers, depth + 1).numpy()
    if kind == "m":
        return torch.empty(rest[1], dtype=DTYPES[rest[0]], device="meta")
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


def _unpack_tensor(buffers: Sequence[Any], index: Any, name: Any, shape: Any) -> Tensor:
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
    raw = buffer if isinstance(buffer, Tensor) else torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)
