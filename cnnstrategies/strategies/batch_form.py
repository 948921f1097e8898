"""Take users' batches apart into values that the codec can send, and put them together with the users' own classes.

Nothing is pickled: an instance of a user's class is sent as the class's name with the values of the instance's
attributes. The receiver must already have imported the class, and no method of the class is called.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.codec import DTYPES
from cnnstrategies.errors import ConfigurationError

PLAIN = (bool, int, float, str, type(None))
# Classes whose instances the codec encodes as they are.
ENCODED = (torch.dtype, torch.device, torch.memory_format, PurePath)
NUMBERS = "biufc"  # Kinds of NumPy's dtypes that torch has as well.
HEAP_TYPE = 1 << 9  # Flag of classes that are defined in Python. Instances of other classes may have hidden state.
DEPTH = 30  # Largest number of levels of nesting. An object that contains itself would otherwise never end.


def yields_pinned(loader: object) -> bool:
    """Whether a loader yields batches in pinned memory, from which a GPU copies while the CPU goes on."""
    return bool(getattr(loader, "pin_memory", False)) and torch.cuda.is_available()


def sendable(tensor: Tensor, path: str) -> Tensor:
    """Return a tensor of a batch that the rank that loads can send to other ranks.

    Args:
        tensor: The tensor.
        path: Name of the tensor in error messages.

    Raises:
        ConfigurationError: The tensor cannot be sent.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.requires_grad or name not in DTYPES:
        kind = "tensor that requires a gradient" if tensor.requires_grad else "tensor"
        raise ConfigurationError(
            f"{path}: a {kind} of dtype {tensor.dtype}, layout {tensor.layout} and device {tensor.device} cannot be "
            "sent from the rank that loads to the other ranks: let collate_fn return dense tensors of a common dtype "
            "without a gradient, and convert them in the step"
        )
    return tensor


class Instance(NamedTuple):
    """An instance of a class.

    Attributes:
        name: Module and qualified name of the class.
        items: The items of a list, tuple or dictionary; None for other classes.
        attributes: The instance's attributes by name.
    """

    name: str
    items: Any
    attributes: dict[str, Any]


class EnumMember(NamedTuple):
    """A member of an Enum: module and qualified name of the class, and name of the member."""

    name: str
    member: str


class ArrayScalar(NamedTuple):
    """A NumPy scalar, as an array without dimensions."""

    value: Any


class ByteString(NamedTuple):
    """Bytes, as an array of integers (n,)."""

    value: Any


class ComplexNumber(NamedTuple):
    """A complex number."""

    real: float
    imaginary: float


def take_apart(value: Any, tensor: Callable[[Tensor, str], Any], path: str = "batch", depth: int = 0) -> Any:
    """Return a batch in a form that the codec can encode.

    Args:
        value: The batch, or a part of the batch.
        tensor: Function of a tensor and its path in the batch. Its result takes the place of the tensor.
        path: Path of the value in the batch, for error messages.
        depth: Number of containers around the value.

    Raises:
        ConfigurationError: A value cannot be sent. The message has the value's path.
    """
    kind = type(value)
    if kind in PLAIN or isinstance(value, ENCODED):
        return value
    if isinstance(value, Tensor):
        return tensor(value, path)
    if depth > DEPTH:
        raise _refusal(value, path)

    def inside(item: Any, suffix: str) -> Any:
        return take_apart(item, tensor, path + suffix, depth + 1)

    if kind in (list, tuple):
        return kind([inside(item, f"[{index}]") for index, item in enumerate(value)])
    if kind in (dict, defaultdict):
        # The function that makes a defaultdict's missing values cannot be sent, so all ranks get a plain dictionary.
        return {_key(key, path): inside(item, f"[{key!r}]") for key, item in value.items()}
    if isinstance(value, np.generic) and value.dtype.kind in NUMBERS:
        return ArrayScalar(np.asarray(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS:
        return value
    if kind is bytes:
        return ByteString(np.frombuffer(value, np.uint8))
    if kind is complex:
        return ComplexNumber(value.real, value.imag)
    if isinstance(value, Enum):
        return EnumMember(_name(value, path), value.name)
    attributes = _attributes(value)
    items: Any = None
    if isinstance(value, (list, tuple)):
        items = [inside(item, f"[{index}]") for index, item in enumerate(value)]
    elif isinstance(value, dict):
        items = {_key(key, path): inside(item, f"[{key!r}]") for key, item in value.items()}
    elif not attributes:
        raise _refusal(value, path)
    if not kind.__flags__ & HEAP_TYPE and kind not in (OrderedDict, SimpleNamespace, torch.Size):
        raise _refusal(value, path)
    return Instance(_name(value, path), items, {name: inside(item, f".{name}") for name, item in attributes.items()})


def put_together(value: Any) -> Any:
    """Return the batch that :func:`take_apart` has taken apart. What has taken the place of tensors stays."""
    kind = type(value)
    if kind in (list, tuple):
        return kind([put_together(item) for item in value])
    if kind is dict:
        return {key: put_together(item) for key, item in value.items()}
    if kind is Instance:
        return _instance(value)
    if kind is EnumMember:
        return _class(value.name)[value.member]  # type: ignore[index]
    if kind is ArrayScalar:
        return value.value[()]
    if kind is ByteString:
        return value.value.tobytes()
    if kind is ComplexNumber:
        return complex(value.real, value.imaginary)
    return value


def _instance(value: Instance) -> Any:
    """Create an instance of a class from its items and attributes, without calling methods of the class."""
    kind, items = _class(value.name), put_together(value.items)
    base = next(base for base in (OrderedDict, dict, list, tuple, SimpleNamespace, object) if issubclass(kind, base))
    if kind is torch.Size:
        return torch.Size(items)
    instance: Any = tuple.__new__(kind, items) if base is tuple else base.__new__(kind)
    if base is list:
        list.extend(instance, items)
    for key, item in items.items() if issubclass(base, dict) else ():
        base.__setitem__(instance, key, item)  # type: ignore[index]
    for name, attribute in value.attributes.items():
        object.__setattr__(instance, name, put_together(attribute))  # Frozen dataclasses have another method.
    return instance


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes by name, including those that the class declares in ``__slots__``."""
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _key(key: Any, path: str) -> Any:
    if type(key) not in PLAIN:
        raise ConfigurationError(
            f"the key {key!r} of {path} cannot be sent from the rank that loads to the other ranks: use a string or a "
            "number as key"
        )
    return key


def _name(value: Any, path: str) -> str:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if _class(name) is not type(value):
        raise ConfigurationError(
            f"{path}: an object of class {name.replace(':', '.')} cannot be sent from the rank that loads to the other "
            "ranks: define the class at the top level of a module"
        )
    return name


def _class(name: str) -> type:
    """Return a class from its module and qualified name; `NoneType` if this process has not imported the class."""
    module, _, path = name.partition(":")
    member: Any = sys.modules.get(module)
    for part in path.split("."):
        member = vars(member).get(part) if isinstance(member, (type, ModuleType)) else None
    return member if isinstance(member, type) else type(None)


def _refusal(value: Any, path: str) -> ConfigurationError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, (np.generic, np.ndarray)):
        kind = f"NumPy value of dtype {value.dtype}"
    return ConfigurationError(
        f"{path}: {kind} cannot be sent from the rank that loads to the other ranks: let collate_fn return tensors, "
        "arrays of numbers, numbers and text, in lists, tuples, dictionaries or dataclasses"
    )
