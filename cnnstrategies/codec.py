"""Serialization of values without pickle: JSON for the structure, raw buffers for the tensors.

A message contains only data: decoding a message does not import modules, and does not call methods of users' classes.
A message may contain instances of NamedTuples, dataclasses and classes registered with torch's pytrees. The receiver
must already have imported the class of each instance.
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

MAX_STRUCTURE = 16 << 20  # largest size, in bytes, of the JSON that contains the structure of a value
MAX_DEPTH = 40  # largest number of levels of nesting in a value
WORD = 8  # number of bytes of each length in the byte strings of `to_bytes`
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
# Keys: names of torch's dtypes and memory formats. Values: the dtypes and memory formats. torch compares them by
# identity, so the decoder must return the objects in this dictionary.
CONSTANTS = {
    str(constant): constant
    for constant in vars(torch).values()
    if isinstance(constant, torch.dtype | torch.memory_format)
}
# An instance of a subclass of these classes is decoded as an instance of the base class, unless the subclass is a
# NamedTuple or a registered pytree node.
CONTAINERS = (dict, list, tuple)

_as_json = json.JSONEncoder(separators=(",", ":")).encode


class CodecError(ConfigurationError):
    """Error for a value that cannot be encoded, or for a message that cannot be decoded."""


def encode(value: Any) -> list[Buffer]:
    """Encode a value as the frames of a message.

    Args:
        value: None, bool, int, float, str, ``Path``, tensor, NumPy array of numbers, torch dtype, memory format or
            device. Lists, tuples, dicts (keys: str, int, float, bool or None), NamedTuples, dataclasses and registered
            pytree nodes may contain these values and each other. Tensors are encoded as contiguous CPU tensors. If a
            tensor is on the meta device, only its shape and dtype are encoded.

    Returns:
        The structure as JSON, followed by one buffer for each tensor.

    Raises:
        CodecError: The value contains an object of an unsupported type, or is too large or too deeply nested.
    """
    buffers: list[Buffer] = []
    structure = _as_json(_pack(value, buffers, 0)).encode()
    if len(structure) > MAX_STRUCTURE:
        raise CodecError(
            f"a value of {len(structure)} bytes without its tensors is larger than the limit of {MAX_STRUCTURE} bytes: "
            "put large lists of numbers into tensors"
        )
    return [structure, *buffers]


def decode(frames: Sequence[Any]) -> Any:
    """Return the value that :func:`encode` has encoded as the frames of a message.

    Args:
        frames: The frames. The first frame is a buffer with the structure. Each other frame contains the elements of
            one tensor. If a frame is a uint8 tensor, the decoded tensor is a view of it, without a copy. If a frame is
            a buffer, its bytes are copied into a new CPU tensor.

    Raises:
        CodecError: The frames are not a valid message.
    """
    if not frames or len(frames[0]) > MAX_STRUCTURE:
        raise CodecError(
            f"a message of {len(frames)} frames must begin with a frame of at most {MAX_STRUCTURE} bytes of JSON"
        )
    try:
        packed = json.loads(bytes(frames[0]))
        return _unpack(packed, frames[1:], 0)
    except CodecError:
        raise
    # Catch all exceptions, because the unflatten function of a registered pytree node may raise any exception.
    except Exception as error:
        raise CodecError(f"the message cannot be decoded: {type(error).__name__}: {error}") from error


def to_bytes(value: Any) -> bytes:
    """Encode a value as one byte string: the number of frames, the length of each frame, then the frames.

    See :func:`encode` for the values that can be encoded.
    """
    return b"".join(to_buffers(value))


def to_buffers(value: Any) -> list[Buffer]:
    """Return buffers whose concatenation is the byte string of :func:`to_bytes`, without a copy of tensors."""
    frames = encode(value)
    return [struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames)), *frames]


def from_bytes(message: Buffer) -> Any:
    """Return the value that :func:`to_bytes` has encoded as a byte string.

    Raises:
        CodecError: The bytes are not a valid message.
    """
    try:
        (count,) = struct.unpack_from("<Q", message)
        lengths = struct.unpack_from(f"<{min(count, len(message))}Q", message, WORD)
    except struct.error as error:
        raise CodecError(
            f"a message of {len(message)} bytes ends before the end of its header, which lists the frames' lengths"
        ) from error
    frames, start = [], WORD * (1 + count)
    for length in lengths:
        frames.append(message[start : start + length])
        start += length
    if start != len(message):
        raise CodecError(f"a message has {len(message)} bytes, but according to its header it has {start} bytes")
    return decode(frames)


def _pack(value: Any, buffers: list[Buffer], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a value with more than {MAX_DEPTH} levels of nesting cannot be sent between processes")
    if value is None or isinstance(value, (bool, int, str)):
        # Instances of subclasses, such as IntEnum members, are decoded as instances of the base class.
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
        f"an object of type {type(value).__module__}.{type(value).__qualname__} cannot be sent between processes, "
        "because objects are not pickled: use numbers, strings, paths, tensors and arrays, in lists, tuples, "
        "dictionaries, NamedTuples and dataclasses"
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
    # Encode a tree that has the structure of the TreeSpec. The decoder computes the TreeSpec from this tree.
    if isinstance(value, TreeSpec):
        return ["g", _pack(tree_unflatten(range(value.num_leaves), value), buffers, depth + 1)]
    if (record := _record(type(value))) is not None:
        return ["o", _name(type(value)), [_pack(part, buffers, depth + 1) for part in record.to_parts(value)]]
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
            f"a tensor of dtype {value.dtype} and layout {value.layout} cannot be sent between processes: convert it "
            "to a dense tensor of a common dtype"
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
        raise CodecError(
            f"an array of dtype {value.dtype} cannot be sent between processes ({error}): use an array of numbers"
        ) from error


@dataclass(frozen=True)
class _Record:
    """Conversion between instances of a class and lists of their fields, without calls of the class's own methods.

    Attributes:
        to_parts: Function that returns the fields of an instance.
        from_parts: Function that creates an instance from its fields.
    """

    to_parts: Callable[[Any], list[Any]]
    from_parts: Callable[[list[Any]], Any]


def _record(cls: type) -> _Record | None:
    """Return the conversion for instances of a class. Return None if a message cannot contain such instances."""
    if cls not in _records and (record := _new_record(cls)) is not None:
        _records[cls] = record
    return _records.get(cls)


_records: dict[type, _Record] = {}  # Results of `_new_record`. A class that has none may be registered later.


def _new_record(cls: type) -> _Record | None:
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _Record(list, partial(_named_tuple, cls))
    # A defaultdict is not a record, because its factory is a function, which cannot be encoded.
    if cls in SUPPORTED_NODES and cls not in (*CONTAINERS, defaultdict):
        node = SUPPORTED_NODES[cls]
        return _Record(lambda value: list(node.flatten_fn(value)), lambda parts: node.unflatten_fn(*parts))
    if is_dataclass(cls) and not issubclass(cls, CONTAINERS):
        names = [field.name for field in fields(cls)]
        return _Record(
            lambda value: [getattr(value, name) for name in names], lambda parts: with_fields(cls, names, parts)
        )
    return None


def _named_tuple(cls: type[tuple[Any, ...]], parts: list[Any]) -> Any:
    if len(parts) != len(cls._fields):  # type: ignore[attr-defined]
        raise CodecError(f"a message has {len(parts)} fields for {_name(cls)}, which has {len(cls._fields)} fields")  # type: ignore[attr-defined]
    return tuple.__new__(cls, parts)


def with_fields(cls: type, names: Sequence[str], parts: list[Any]) -> Any:
    """Create an instance of a dataclass from its fields, without calling its ``__init__``.

    Args:
        cls: The dataclass.
        names: Names of the fields.
        parts: Values of the fields, in the order of `names`.
    """
    instance: Any = object.__new__(cls)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(instance, name, part)
    return instance


def _name(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if loaded_record(name) is not cls:
        raise CodecError(f"{name} cannot be sent between processes: define the class at the top level of a module")
    return name


def loaded_record(name: str) -> type | None:
    """Look up the class of a record by name, among the modules that this process has already imported.

    Args:
        name: Module and qualified name, such as ``module:Outer.Record``.

    Returns:
        The class; None if its module is not imported, or if it is not a NamedTuple, a dataclass or a registered pytree
        node.
    """
    module, _, path = name.partition(":")
    member: Any = sys.modules.get(module)
    for part in path.split("."):
        member = vars(member).get(part) if isinstance(member, type | ModuleType) else None
    return member if isinstance(member, type) and _record(member) is not None else None


def _unpack(packed: Any, buffers: Sequence[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError(f"a message has more than {MAX_DEPTH} levels of nesting")
    if packed is None or isinstance(packed, (bool, int, float, str)):
        return packed
    kind, rest = packed[0], packed[1:]
    if kind == "o":
        cls = loaded_record(rest[0])
        record = None if cls is None else _record(cls)
        if record is None:
            raise CodecError(
                f"a message contains an instance of {rest[0]!r}, but this process has not imported a NamedTuple or "
                "dataclass of that name: import its module on every rank"
            )
        return record.from_parts([_unpack(part, buffers, depth + 1) for part in rest[1]])
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
    raise CodecError(f"a message contains an unknown kind of value: {kind!r}")


def _unpack_tensor(buffers: Sequence[Any], index: Any, name: Any, shape: Any) -> Tensor:
    if type(index) is not int or not 0 <= index < len(buffers) or name not in DTYPES:
        raise CodecError(
            f"a tensor in a message has the buffer number {index!r} and the dtype {name!r}: the number must be below "
            f"{len(buffers)}, and the dtype must be a common dtype of torch"
        )
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CodecError(f"a message contains a tensor of shape {shape!r}")
    dtype = DTYPES[name]
    count, buffer = math.prod(shape), buffers[index]
    if len(buffer) != count * dtype.itemsize:
        raise CodecError(
            f"a tensor in a message has shape {shape} and dtype {name}, but its buffer has {len(buffer)} bytes"
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = buffer if isinstance(buffer, Tensor) else torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)
