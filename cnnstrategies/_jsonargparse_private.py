"""What this package changes of jsonargparse, which has no public way: how often it works out the same thing.

A start of the command line asks six thousand times which option has a name, and each time goes through all options; it
splits some twenty thousand keys, and asks thousands of times under which path Python's own types of annotations are
imported. Together that was more than a third of a start. `tests/commands/test_parser.py` watches the names.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from jsonargparse import Namespace, _core, _namespace, _subcommands, _typehints, _util

OF_PYTHON = ("abc", "builtins", "types", "typing")
look = _subcommands.find_action_and_subcommand
_found: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
place_of = Namespace._parse_key
_path_of = _util.get_import_path
_path_of_pythons = lru_cache(_path_of)
NestedArg: Any = _util.NestedArg  # the value of --class.argument, with the argument's name as its key
adapt: Any = _typehints.adapt_typehints
import_path = _path_of  # as it stands in the configurations that jsonargparse writes


def _find(parser: Any, dest: str, exclude: Any = None) -> Any:
    if getattr(parser, "_subcommands_action", None) is not None:  # Which has the options is another parser.
        return look(parser, dest, exclude)
    known = _found.setdefault(parser, {})
    place = (len(parser._actions), dest, exclude)
    if place not in known:
        known[place] = look(parser, dest, exclude)
    return known[place]


@lru_cache(maxsize=8192)
def _split(key: str) -> tuple[list[str], str, str] | None:
    """A key's first parts, its last one, and the first ones together; None where it is not to be."""
    parts = key.split(".")
    if " " in key or not all(parts):
        return None
    *first, last = map(_namespace.add_clash_mark, parts)
    return first, last, ".".join(first)


def parse_key(self: Namespace, key: str) -> tuple[str, Namespace | None, str]:
    """What ``place_of`` says, which is jsonargparse's own: a key's last part, where that is, and the others."""
    split = _split(key) if isinstance(key, str) else None
    if split is None:
        return place_of(self, key)
    first, last, together = split
    inner: Any = self
    for part in first:
        inner = vars(inner).get(part)
        if not isinstance(inner, Namespace):  # Nothing is there yet, or something else.
            return place_of(self, key)
    return last, inner, together


def _import_path(value: Any) -> str | None:
    pythons = isinstance(value, type) and value.__module__ in OF_PYTHON
    return _path_of_pythons(value) if pythons else _path_of(value)


def remember() -> None:
    """Have it look once for each option, as long as a parser gets no more of them, and split each key once."""
    for module in (_core, _subcommands):
        module.find_action_and_subcommand = _find  # type: ignore[attr-defined]
    Namespace._parse_key = parse_key  # type: ignore[method-assign]
    _util.get_import_path = _import_path


def pass_values_through(kind: type, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Have values of a class pass through a function before jsonargparse reads them.

    Args:
        kind: The annotation of the parameters whose values are meant, also as a part of a union.
        change: Takes a value and the earlier value that it changes, and returns both as jsonargparse is to see them.
    """

    def changed(val: Any, typehint: Any, *, prev_val: Any = None, **kwargs: Any) -> Any:
        if typehint is kind:
            val, prev_val = change(val, prev_val)
        return adapt(val, typehint, prev_val=prev_val, **kwargs)

    _typehints.adapt_typehints = changed  # type: ignore[assignment]
