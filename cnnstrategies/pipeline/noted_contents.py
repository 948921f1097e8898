"""Tell in a few microseconds whether many dictionaries and lists have the contents that were noted."""

from collections import deque
from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from operator import is_, methodcaller
from typing import Any

_values = methodcaller("values")


class NotedContents:
    """The contents of dictionaries and lists at one time.

    The elements are compared by identity, and by functions of C: a network has thousands of attributes, and a loop in
    Python over its modules would take longer than a small layer.

    Args:
        containers: The dictionaries and lists.
        sizes: Other containers, of which only the number of elements counts.
    """

    def __init__(
        self, containers: Iterable[dict[Any, Any] | list[Any] | deque[Any]], sizes: Iterable[Sized] = ()
    ) -> None:
        containers = list(containers)
        self._sized: Sequence[Sized] = [*containers, *sizes]
        self._sizes = [*map(len, self._sized)]
        filled = [container for container in containers if container]
        self._dictionaries = [container for container in filled if isinstance(container, dict)]
        # Iteration over a dictionary gives its keys, so the elements are the keys, and the elements of the lists.
        self._filled, self._elements = filled, [*chain.from_iterable(filled)]
        self._values = [*chain.from_iterable(map(_values, self._dictionaries))]

    @property
    def hold(self) -> bool:
        """Whether the contents are still the noted ones. False if a key was replaced by an equal one."""
        return (
            [*map(len, self._sized)] == self._sizes
            and all(map(is_, chain.from_iterable(self._filled), self._elements))
            and all(map(is_, chain.from_iterable(map(_values, self._dictionaries)), self._values))
        )
