"""Whether two objects are in the same state: all that is in them, in turn."""

from collections.abc import Iterator, Mapping
from typing import Any

from cnnstrategies.paramserver.core.node import Message


def differing(one: object, other: object) -> str | None:
    """Where the states of two objects differ, and what is there; None if they are the same.

    Methods are compared by name, and what holds another object that is being looked at is not followed back to it.
    """
    return next(_differing(one, other, "", set()), None)


def _differing(one: Any, other: Any, where: str, seen: set[int]) -> Iterator[str]:
    if id(one) in seen:
        return
    if callable(one):
        if one.__name__ != other.__name__:
            yield f"{where}: {one.__name__} and {other.__name__}"
        return
    names = getattr(one, "__dict__", None)
    if names is not None and type(one) is type(other):
        seen.add(id(one))
        one, other = ({name: getattr(it, name) for name in names} for it in (one, other))
    if isinstance(one, Message):
        one, other = one._asdict(), other._asdict()
    if isinstance(one, Mapping) and one.keys() == other.keys():
        for name, value in one.items():
            yield from _differing(value, other[name], f"{where} {name}", seen)
    elif isinstance(one, list | tuple) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{where} {index}", seen)
    elif one != other:
        yield f"{where}: {one} and {other}"
