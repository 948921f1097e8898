"""The JSON object of a message of the data plane, field by field: each is of its type, or the message is none."""

from collections.abc import Mapping
from typing import Any

from cnnstrategies.paramserver.messages import LARGEST_NUMBER, Header, InvalidMessageError, unpack_json


class Fields:
    """What a server reads of a message, checked before anything is done with it: what fails later is our own mistake.

    Args:
        values: As JSON gave it.

    Raises:
        InvalidMessageError: It is no object; of all methods, that a field is missing or of another type.
    """

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise InvalidMessageError("not a JSON object")
        self.values: Mapping[str, Any] = values

    @classmethod
    def of(cls, payload: memoryview, header: Header) -> "Fields":
        """Those at the start of a payload."""
        return cls(unpack_json(payload, header))

    def object(self, name: str) -> "Fields | None":
        """An object, or None."""
        value = self._there(name)
        return None if value is None else Fields(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._there(name)
        if type(value) is not bool:
            raise InvalidMessageError(f"{name} is neither true nor false")
        return value

    def integer(self, name: str) -> int:
        """An integer of at most 63 bits that is not negative."""
        return _number(name, self._there(name))

    def real(self, name: str) -> float:
        """A number that is not negative, or none at all (NaN), as norms may be."""
        value = self._there(name)
        if type(value) is int and 0 <= value < LARGEST_NUMBER:
            return float(value)
        if type(value) is not float or value < 0:
            raise InvalidMessageError(f"{name} is no norm and no factor")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers as in :meth:`integer`."""
        return tuple(_number(name, one) for one in self._list(name))

    def table(self, name: str, width: int) -> list[tuple[int, ...]]:
        """A list of lists of as many integers."""
        rows = self._list(name)
        if not all(isinstance(row, list) and len(row) == width for row in rows):
            raise InvalidMessageError(f"{name} is no table of {width} columns")
        return [tuple(_number(name, one) for one in row) for row in rows]

    def _list(self, name: str) -> list[Any]:
        value = self._there(name)
        if not isinstance(value, list):
            raise InvalidMessageError(f"{name} is no list")
        return value

    def _there(self, name: str) -> Any:
        if name not in self.values:
            raise InvalidMessageError(f"{name} is missing")
        return self.values[name]


def _number(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST_NUMBER:
        raise InvalidMessageError(f"{name} is no number of at most 63 bits")
    return value
