"""What this package changes of jsonargparse, which has no public way: how often it looks for the same thing.

A start of the command line asks six thousand times which option has a name, and each time goes through all options: a
quarter of what a start takes. `tests/commands/test_parser.py` watches the names.
"""

from typing import Any
from weakref import WeakKeyDictionary

from jsonargparse import _core, _subcommands

look = _subcommands.find_action_and_subcommand
_found: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def _find(parser: Any, dest: str, exclude: Any = None) -> Any:
    if getattr(parser, "_subcommands_action", None) is not None:  # Which has the options is another parser.
        return look(parser, dest, exclude)
    known = _found.setdefault(parser, {})
    place = (len(parser._actions), dest, exclude)
    if place not in known:
        known[place] = look(parser, dest, exclude)
    return known[place]


def remember_options() -> None:
    """Have it look once for each name, as long as a parser gets no more options."""
    for module in (_core, _subcommands):
        module.find_action_and_subcommand = _find  # type: ignore[attr-defined]
