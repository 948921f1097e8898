"""Return for a moment to the state in which a call of a network has found the modules."""

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from cnnstrategies.pipeline.saved_copies import saving_copies

if TYPE_CHECKING:
    from cnnstrategies.pipeline.watched import Container, StoredKey, WatchedTensor, WatchedVariables

T = TypeVar("T")
# Function that restores a noted value. It returns a function that undoes this; None if the value has not changed.
Restorer = Callable[[], Callable[[], None] | None]


class NotedState:
    """The state of modules at the start of a call of a network, as `StoredWatch` has noted it.

    The program may change modules between the forward and the backward: it sets an attribute, clears a list, removes a
    hook, or calls ``eval()``. A forward that runs again in the backward must find the modules as the first forward has
    found them.

    Args:
        watched: The attributes of modules and of other objects, the lists and dictionaries that they refer to, and
            tensors that a forward may change in place.
        hook_tables: The tables of hooks that belong to the state, see `hook_tables`.
        changing: Paths of tensors that forwards change in place.
    """

    def __init__(
        self,
        watched: Sequence["Container | WatchedVariables | WatchedTensor"],
        hook_tables: Sequence[dict[int, Any]],
        changing: Set[tuple[Any, ...]],
    ) -> None:
        # Several modules may refer to the same list.
        targets: dict[int, Container | WatchedVariables | WatchedTensor] = {}
        for value in watched:
            targets.setdefault(id(value.target), value)
        self._watched = [(value, value.restorer()) for value in targets.values()]
        self._changing = changing
        self._hooks = [*zip(hook_tables, map(dict, hook_tables), strict=True)]

    def run(self, function: Callable[[], T]) -> tuple[T, dict["StoredKey", Any]]:
        """Run a function in the noted state. Afterwards the state is what it was before this method.

        Returns:
            The function's result, and what the function has stored, see `StoredWatch.take`.
        """
        stored: dict[StoredKey, Any] = {}
        with ExitStack() as stack:
            for table, hooks in self._hooks:
                stack.callback(_fill, table, dict(table))
                _fill(table, hooks)
            for _, restore in self._watched:
                if (undo := restore()) is not None:
                    stack.callback(undo)
            stack.callback(self._take, stored)
            tensors = [value.target for value, _ in self._watched if value.path in self._changing]
            with saving_copies(tensor for tensor in tensors if isinstance(tensor, Tensor)):
                result = function()
        return result, stored

    def _take(self, stored: dict["StoredKey", Any]) -> None:
        """Move what the function has stored into a dictionary, and restore the noted state."""
        for value, _ in self._watched:
            if value.has_changed():
                value.take(stored, {})


def _fill(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    if table != content:
        table.clear()
        table.update(content)
