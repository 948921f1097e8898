"""Private names of jsonargparse that this package needs, and caches for slow functions of jsonargparse.

When the command line starts, jsonargparse searches for an option by its name six thousand times, each time among all
options. It splits about twenty thousand keys, and determines the import paths of Python's built-in types thousands of
times. Without caches, this work took more than a third of the start-up time. jsonargparse has no public way to avoid
this work.

`tests/commands/test_parser.py` fails if the private names change.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from jsonargparse import Namespace, _core, _namespace, _subcommands, _typehints, _util

PYTHON_MODULES = ("abc", "builtins", "types", "typing")
# The original functions and classes of jsonargparse.
find_option = _subcommands.find_action_and_subcommand
split_key = Namespace._parse_key
import_path = _util.get_import_path  # Returns the import path that jsonargparse writes into configurations.
# Class of a value that the user set with --class.argument. It holds the argument's name and value.
NestedArg: Any = _util.NestedArg
adapt: Any = _typehints.adapt_typehints

_import_path_of_python_types = lru_cache(import_path)
_options_by_parser: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _find(parser: Any, dest: str, exclude: Any = None) -> Any:
    # The parsers of the subcommands have the options, so nothing is cached for the parser that has the subcommands.
    if getattr(parser, "_subcommands_action", None) is not None:
        return find_option(parser, dest, exclude)
    options = _options_by_parser.setdefault(parser, {})
    key = (len(parser._actions), dest, exclude)
    if key not in options:
        options[key] = find_option(parser, dest, exclude)
    return options[key]


@lru_cache(maxsize=8192)
def _split(key: str) -> tuple[list[str], str, str] | None:
    """Split a key such as ``a.b.c`` at the dots.

    Returns:
        The parents as a list (``a``, ``b``), the last name (``c``), and the parents' key (``a.b``); None if
        jsonargparse does not accept the key.
    """
    parts = key.split(".")
    if " " in key or not all(parts):
        return None
    *parents, last = map(_namespace.add_clash_mark, parts)
    return parents, last, ".".join(parents)


def parse_key(self: Namespace, key: str) -> tuple[str, Namespace | None, str]:
    """Split a key like jsonargparse's function ``split_key``, but faster.

    Returns:
        The last name of the key, the namespace that contains this name, and the key of that namespace.
    """
    split = _split(key) if isinstance(key, str) else None
    if split is None:
        return split_key(self, key)
    parents, last, parent_key = split
    inner: Any = self
    for part in parents:
        inner = vars(inner).get(part)
        # jsonargparse itself handles a key whose namespace does not exist yet, or has a value of a different type.
        if not isinstance(inner, Namespace):
            return split_key(self, key)
    return last, inner, parent_key


def _import_path(value: Any) -> str | None:
    is_python_type = isinstance(value, type) and value.__module__ in PYTHON_MODULES
    return _import_path_of_python_types(value) if is_python_type else import_path(value)


def remember() -> None:
    """Install the caches. jsonargparse then searches for each option, and splits each key, only once.

    After an option has been added to a parser, the parser's options are searched again.
    """
    for module in (_core, _subcommands):
        module.find_action_and_subcommand = _find  # type: ignore[attr-defined]
    Namespace._parse_key = parse_key  # type: ignore[method-assign]
    _util.get_import_path = _import_path


def pass_values_through(kind: type, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Make jsonargparse call a function on the values of parameters of one type, before it parses the values.

    Args:
        kind: The type in the parameters' annotations. An annotation that is a union with this type is included.
        change: Function that takes the value and the previous value of the parameter, and returns both in the form that
            jsonargparse expects.
    """

    def changed(val: Any, typehint: Any, *, prev_val: Any = None, **kwargs: Any) -> Any:
        if typehint is kind:
            val, prev_val = change(val, prev_val)
        return adapt(val, typehint, prev_val=prev_val, **kwargs)

    _typehints.adapt_typehints = changed  # type: ignore[assignment]
