"""Conversion of a coordinator's state to values that JSON can represent, and back.

A state is a graph: several objects may refer to the same object, and an object may refer back to the object that
contains it. So the values are a table with one entry for each object. In an entry, a scalar stands for itself, and any
other object is a list with the number of its entry. To read a table creates only builtin containers, and instances of
this package's own classes, without a call of their methods.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from types import MethodType
from typing import Any

from cnnstrategies.paramserver.core.node import Buffer

PACKAGE = "cnnstrategies.paramserver."  # Only classes of these modules are created.
SCALARS = frozenset({type(None), bool, int, float, str})
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class StateError(ValueError):
    """Error for a state that cannot be converted."""


def to_table(root: object) -> tuple[list[Any], list[Buffer]]:
    """Return the table of an object and of everything to which it refers, and the contents of all bytes in it.

    Raises:
        StateError: The state contains an object of an unsupported type.
    """
    writer = _Writer()
    writer.place(root)
    return writer.table, writer.buffers


def from_table(table: Sequence[Any], buffers: Sequence[bytes]) -> Any:
    """Return the object that :func:`to_table` has converted.

    Raises:
        StateError: The table names a class outside of this package.
    """
    return _Reader(table, buffers).object_at([0])


class _Writer:
    def __init__(self) -> None:
        self.table: list[Any] = []
        self.buffers: list[Buffer] = []
        self._places: dict[int, list[int]] = {}  # by id of an object: a list with the number of its entry

    def place(self, value: Any) -> Any:
        """Return what stands for a value in an entry."""
        if type(value) in SCALARS:
            return value
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = [len(self.table)]
            self.table.append(None)
            self.table[place[0]] = self._entry(value)
        return place

    def _entry(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind in (bytes, bytearray, memoryview):
            self.buffers.append(value)
            return ["bytes", len(self.buffers) - 1]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, self._list(value)]
        if kind is dict:
            return ["dict", self._list(value), self._list(value.values())]
        if kind is deque:
            return ["deque", self._list(value), value.maxlen]
        if kind is MethodType:
            return ["method", self.place(value.__self__), value.__name__]
        name = f"{kind.__module__}:{kind.__qualname__}"
        _class_named(name)
        if isinstance(value, Enum):
            return ["enum", name, value.value]
        if isinstance(value, tuple):
            return ["named tuple", name, self._list(value)]
        return ["object", name, {attribute: self.place(part) for attribute, part in vars(value).items()}]

    def _list(self, values: Iterable[Any]) -> list[Any]:
        return [self.place(value) for value in values]


class _Reader:
    def __init__(self, table: Sequence[Any], buffers: Sequence[bytes]) -> None:
        self._table = table
        self._buffers = buffers
        self._objects: dict[int, Any] = {}

    def object_at(self, place: Any) -> Any:
        """Return the value for which something in an entry stands."""
        if not isinstance(place, list):
            return place
        (number,) = place
        if number not in self._objects:
            self._objects[number] = self._created(number, *self._table[number])
        return self._objects[number]

    def _created(self, number: int, kind: str, *rest: Any) -> Any:
        if kind == "bytes":
            return self._buffers[rest[0]]
        if kind in CONTAINERS:
            return CONTAINERS[kind](self._list(rest[0]))
        if kind == "dict":
            return dict(zip(self._list(rest[0]), self._list(rest[1]), strict=True))
        if kind == "deque":
            return deque(self._list(rest[0]), rest[1])
        if kind == "method":
            return getattr(self.object_at(rest[0]), rest[1])
        cls = _class_named(rest[0])
        if kind == "enum":
            return cls(rest[1])
        if kind == "named tuple":
            return tuple.__new__(cls, self._list(rest[1]))
        # The object's parts may refer back to the object.
        self._objects[number] = instance = object.__new__(cls)
        vars(instance).update({attribute: self.object_at(part) for attribute, part in rest[1].items()})
        return instance

    def _list(self, places: list[Any]) -> list[Any]:
        return [self.object_at(place) for place in places]


def _class_named(name: str) -> Any:
    """Return the class of this package with a module and a qualified name, such as ``module:Class``."""
    module, _, path = name.partition(":")
    cls = vars(sys.modules[module]).get(path) if module.startswith(PACKAGE) and module in sys.modules else None
    if not isinstance(cls, type):
        raise StateError(f"the coordinator's state cannot contain an object of the class {name}")
    return cls
