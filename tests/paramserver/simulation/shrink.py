"""Makes a failing run smaller: takes away faults as long as it fails in the same way."""

from collections.abc import Callable, Sequence
from typing import TypeVar

One = TypeVar("One")


def shrink(ones: Sequence[One], fails: Callable[[Sequence[One]], bool]) -> list[One]:
    """A part of some things with which a run still fails, and without any one of which it does not."""
    kept = list(ones)
    size = max(1, len(kept) // 2)
    while kept:
        for start in range(0, len(kept), size):
            part = kept[:start] + kept[start + size :]
            if fails(part):
                kept = part
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return kept
