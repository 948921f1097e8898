"""Whether the hyper-parameters that a message brings may replace those of the specification."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.specification import Group, Options

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


def check_before_sending(options: Sequence[Mapping[str, Any]], groups: Sequence[Group], step: int) -> None:
    """Refuse at its worker what the servers would drop: the step would never end.

    Args:
        options: The hyper-parameters of each parameter group.
        groups: The groups at the start of the run.
        step: The step that they are for.

    Raises:
        ConfigurationError: One of them cannot replace that of the start; it is named.
    """
    for number, (given, group) in enumerate(zip(options, groups, strict=True)):
        for name, first in group.options.items():
            if not _alike(_listed(given[name]), first):
                what = f"step {step}: {name}={given[name]} of parameter group {number}"
                if isinstance(given[name], float) and not math.isfinite(given[name]):
                    raise ConfigurationError(f"{what} is no finite number: look at the learning rate's schedule")
                raise ConfigurationError(
                    f"{what} was {first} at the start, and the servers take only other numbers: leave it as it was"
                )


def _listed(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option


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
