"""Tell in a few microseconds whether many dictionaries and lists have the contents that were noted."""

from collections import deque
from collections.abc import Iterable, Sequence, Sized
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any

_values = methodcaller("values")
# Attributes in which torch keeps tables that no code replaces by others, which are half of a module's attributes.
STATIC = frozenset(
    (
        *("_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs"),
        *("_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"),
        *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)


class NotedContents:
    """The contents of dictionaries and lists at one time.

    The elements are compared by identity, and by functions of C: a network has thousands of attributes, and a loop in
    Python over its modules would take longer than a small layer.

    Args:
        containers: The dictionaries and lists.
        sizes: Other containers, of which only the number of elements counts.
        attributes: Attributes of modules. Those in :data:`STATIC` do not count.
    """

    def __init__(
        self,
        containers: Iterable[dict[Any, Any] | list[Any] | deque[Any]],
        sizes: Iterable[Sized] = (),
        attributes: Iterable[dict[str, Any]] = (),
    ) -> None:
        containers = list(containers)
        self._parts = [
            (itemgetter(*(key for key in of_module if key not in STATIC)), of_module) for of_module in attributes
        ]
        self._present = [*chain.from_iterable(get(of_module) for get, of_module in self._parts)]
        self._sized: Sequence[Sized] = [*containers, *sizes, *(of_module for _, of_module in self._parts)]
        self._sizes = [*map(len, self._sized)]
        filled = [container for container in containers if container]
        self._dictionaries = [container for container in filled if isinstance(container, dict)]
        # Iteration over a dictionary gives its keys, so the elements are the keys, and the elements of the lists.
        self._filled, self._elements = filled, [*chain.from_iterable(filled)]
        self._values = [*chain.from_iterable(map(_values, self._dictionaries))]

    @property
    def hold(self) -> bool:
        """Whether the contents are still the noted ones. False if a key was replaced by an equal one."""
        try:
            present = [get(of_module) for get, of_module in self._parts]
        except KeyError:
            return False
        return (
            [*map(len, self._sized)] == self._sizes
            and all(map(is_, chain.from_iterable(present), self._present))
            and all(map(is_, chain.from_iterable(self._filled), self._elements))
            and all(map(is_, chain.from_iterable(map(_values, self._dictionaries)), self._values))
        )
