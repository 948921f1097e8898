"""Values of messages with something of them changed, as a peer may send them that is wrong, or means ill."""

import random
from collections.abc import Sequence
from typing import Any

NUMBERS = [0, 1, 2, 3, 7, -1, 1 << 20, (1 << 63) - 1, 1 << 70, 1.5, -1.0, 1e30, float("nan"), float("inf"), 10**400]
TEXTS = ["", "x", "worker", "server", "ff", "-5", "0/step", "7/step", "x/step", "\ud800"]
LISTS: list[Any] = [[], [0], [[]], ["x"], [[0, 0]], [[0, 0, 0]], [["worker", 0]], {}, {"a": []}, {"a": 1}]
VALUES = [*NUMBERS, *TEXTS, *LISTS, None, True, False]


def changed(value: Any, chance: random.Random, values: Sequence[Any] = VALUES) -> Any:
    """A value of JSON in which something is replaced, left out or doubled."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.15:
            return {one: it for one, it in value.items() if one != name}
        return {**value, name: changed(value[name], chance, values)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        some = [changed(value[place], chance, values)] * chance.randrange(3)
        return [*value[:place], *some, *value[place + 1 :]]
    return chance.choice(values)
