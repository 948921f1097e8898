"""The private names of jsonargparse that this package needs, and caches for functions that repeat their work.

A start of the command line looks for an option by its name six thousand times, and each time walks through all options.
It splits about twenty thousand keys, and looks up the import paths of Python's own types thousands of times. Together
this was more than a third of a start. jsonargparse has no public way to avoid it. `tests/commands/test_parser.py`
notices if the private names change.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from jsonargparse import Namespace, _core, _namespace, _subcommands, _typehints, _util

PYTHON_MODULES = ("abc", "builtins", "types", "typing")
# jsonargparse's own names.
find_option = _subcommands.find_action_and_subcommand
split_key = Namespace._parse_key
import_path = _util.get_import_path  # as it stands in the configurations that jsonargparse writes
NestedArg: Any = _util.NestedArg  # the value of --class.argument, with the argument's name as its key
adapt: Any = _typehints.adapt_typehints

_import_path_of_python_types = lru_cache(import_path)
_options_by_parser: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _find(parser: Any, dest: str, exclude: Any = None) -> Any:
    if getattr(parser, "_subcommands_action", None) is not None:  # The subcommand's parser has the options.
        return find_option(parser, dest, exclude)
    options = _options_by_parser.setdefault(parser, {})
    key = (len(parser._actions), dest, exclude)
    if key not in options:
        options[key] = find_option(parser, dest, exclude)
    return options[key]


@lru_cache(maxsize=8192)
def _split(key: str) -> tuple[list[str], str, str] | None:
    """Return a key's parents, its last part, and the parents as one text; None if jsonargparse would refuse the key."""
    parts = key.split(".")
    if " " in key or not all(parts):
        return None
    *parents, last = map(_namespace.add_clash_mark, parts)
    return parents, last, ".".join(parents)


def parse_key(self: Namespace, key: str) -> tuple[str, Namespace | None, str]:
    """Return a key's last part, the namespace that has it, and the key of that namespace, as ``split_key`` does."""
    split = _split(key) if isinstance(key, str) else None
    if split is None:
        return split_key(self, key)
    parents, last, parent_key = split
    inner: Any = self
    for part in parents:
        inner = vars(inner).get(part)
        if not isinstance(inner, Namespace):  # The namespace does not exist yet, or the value is something else.
            return split_key(self, key)
    return last, inner, parent_key


def _import_path(value: Any) -> str | None:
    is_python_type = isinstance(value, type) and value.__module__ in PYTHON_MODULES
    return _import_path_of_python_types(value) if is_python_type else import_path(value)


def remember() -> None:
    """Make jsonargparse look for each option once, until its parser gets another option, and split each key once."""
    for module in (_core, _subcommands):
        module.find_action_and_subcommand = _find  # type: ignore[attr-defined]
    Namespace._parse_key = parse_key  # type: ignore[method-assign]
    _util.get_import_path = _import_path


def pass_values_through(kind: type, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Pass values of a class through a function before jsonargparse reads them.

    Args:
        kind: Annotation of the parameters, also as a part of a union.
        change: Takes a value and the earlier value that it changes; returns both in the form for jsonargparse.
    """

    def changed(val: Any, typehint: Any, *, prev_val: Any = None, **kwargs: Any) -> Any:
        if typehint is kind:
            val, prev_val = change(val, prev_val)
        return adapt(val, typehint, prev_val=prev_val, **kwargs)

    _typehints.adapt_typehints = changed  # type: ignore[assignment]
