"""What can be tried on a device: settings that one may choose freely, and those that change what is learned."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnnstrategies.planning.candidates import Effect


@dataclass(frozen=True)
class Setting:
    """One way to run.

    Attributes:
        name: In a few words.
        values: Configuration keys and their values.
        effect: What it changes.
    """

    name: str
    values: Mapping[str, Any]
    effect: Effect


def factorial(choices: Sequence[Sequence[Setting]]) -> Iterator[Setting]:
    """All combinations of one or none of each group but the empty one; they interact, so none is left out.

    Args:
        choices: Groups of settings that exclude each other.
    """
    for combination in itertools.product(*((None, *group) for group in choices)):
        chosen = [one for one in combination if one is not None]
        if chosen:
            values: dict[str, Any] = {}
            for one in chosen:
                values.update(one.values)
            yield Setting(", ".join(one.name for one in chosen), values, max(one.effect for one in chosen))
