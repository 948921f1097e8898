"""Comparison of the states of two objects, including everything that they refer to."""

from collections.abc import Iterator, Mapping
from typing import Any

from cnnstrategies.paramserver.core.node import Message


def differing(first: object, second: object) -> str | None:
    """Return the first difference between the states of two objects; None if the states are the same.

    Methods are compared by name. References back to an object that is already being compared are not followed.
    """
    return next(_differing(first, second, "", set()), None)


def _differing(first: Any, second: Any, where: str, seen: set[int]) -> Iterator[str]:
    if id(first) in seen:
        return
    if callable(first):
        if first.__name__ != second.__name__:
            yield f"{where}: {first.__name__} and {second.__name__}"
        return
    names = getattr(first, "__dict__", None)
    if names is not None and type(first) is type(second):
        seen.add(id(first))
        first, second = ({name: getattr(item, name) for name in names} for item in (first, second))
    if isinstance(first, Message):
        first, second = first._asdict(), second._asdict()
    if isinstance(first, Mapping) and first.keys() == second.keys():
        for name, value in first.items():
            yield from _differing(value, second[name], f"{where} {name}", seen)
    elif isinstance(first, list | tuple) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from _differing(*pair, f"{where} {index}", seen)
    elif first != second:
        yield f"{where}: {first} and {second}"
