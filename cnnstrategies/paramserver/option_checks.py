"""Whether the hyper-parameters that a message brings may replace those of the specification."""

from collections.abc import Sequence
from typing import Any

from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.specification import Group
from cnnstrategies.paramserver.store import Options

LARGEST_OPTION = 1e30


def check_options(options: Any, groups: Sequence[Group]) -> Options:
    """The hyper-parameters of each parameter group, if they are of the groups' form.

    Raises:
        InvalidMessageError: They are not.
    """
    if not _alike(options, [group.options for group in groups]):
        raise InvalidMessageError("hyper-parameters of other parameter groups")
    checked: Options = options
    return checked


def _alike(value: Any, given: Any) -> bool:
    """Whether an option may replace another: numbers for numbers, and lists and objects of the same size."""
    if isinstance(given, dict):
        return (
            isinstance(value, dict) and value.keys() == given.keys() and all(_alike(value[k], given[k]) for k in given)
        )
    if isinstance(given, list | tuple):
        return isinstance(value, list) and len(value) == len(given) and all(map(_alike, value, given))
    if isinstance(given, bool | str) or given is None:
        return bool(value == given)
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_OPTION
