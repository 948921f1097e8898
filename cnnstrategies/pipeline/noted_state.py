"""Return for a moment to the state in which a call of a network has found the modules."""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from cnnstrategies.pipeline.saved_copies import saving_copies

if TYPE_CHECKING:
    from cnnstrategies.pipeline.watched import Container, StoredKey, WatchedTensor, WatchedVariables

T = TypeVar("T")
_EMPTY: Mapping[int, Any] = MappingProxyType({})
# Function that restores a noted value. It returns a function that undoes this; None if the value has not changed.
Restorer = Callable[[], Callable[[], None] | None]


class NotedState:
    """The state of modules at the start of a call of a network, as `StoredWatch` has noted it.

    The program may change modules between the forward and the backward: it sets an attribute, clears a list, removes a
    hook, or calls ``eval()``. A forward that runs again in the backward must find the modules as the first forward has
    found them.

    Args:
        records: For each module, its attributes, those of other objects and the lists and dictionaries that they refer
            to, and tensors that a forward may change in place. The sequences and the containers do not change.
        hook_tables: The tables of hooks that belong to the state, see `hook_tables`.
        changing: Paths of tensors that forwards change in place.
    """

    def __init__(
        self,
        records: Sequence[tuple[Sequence["Container | WatchedVariables"], Sequence["WatchedTensor"]]],
        hook_tables: Sequence[dict[int, Any]],
        changing: Set[tuple[Any, ...]],
    ) -> None:
        self._records = [(containers, [(t, t.restorer()) for t in tensors]) for containers, tensors in records]
        self._changing = changing
        # Most tables are empty.
        self._hooks = [(table, dict(table) if table else _EMPTY) for table in hook_tables]

    def run(self, function: Callable[[], T]) -> tuple[T, dict["StoredKey", Any]]:
        """Run a function in the noted state. Afterwards the state is what it was before this method.

        Returns:
            The function's result, and what the function has stored, see `StoredWatch.take`.
        """
        stored: dict[StoredKey, Any] = {}
        watched = self._watched()
        with ExitStack() as stack:
            for table, hooks in self._hooks:
                stack.callback(_fill, table, dict(table))
                _fill(table, hooks)
            for _, restore in watched:
                if (undo := restore()) is not None:
                    stack.callback(undo)
            stack.callback(_take, [value for value, _ in watched], stored)
            tensors = [value.target for value, _ in watched if value.path in self._changing]
            with saving_copies(tensor for tensor in tensors if isinstance(tensor, Tensor)):
                result = function()
        return result, stored

    def _watched(self) -> list[tuple["Container | WatchedVariables | WatchedTensor", Restorer]]:
        """Return what is restored, each once: several modules may refer to the same list."""
        targets: dict[int, tuple[Container | WatchedVariables | WatchedTensor, Restorer]] = {}
        for containers, tensors in self._records:
            for container in containers:
                targets.setdefault(id(container.target), (container, container.restorer()))
            for tensor, restorer in tensors:
                targets.setdefault(id(tensor.target), (tensor, restorer))
        return [*targets.values()]


def _take(watched: Sequence["Container | WatchedVariables | WatchedTensor"], stored: dict["StoredKey", Any]) -> None:
    """Move what a function has stored into a dictionary, and restore the noted state."""
    for value in watched:
        if value.has_changed():
            value.take(stored, {})


def _fill(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    if table != content:
        table.clear()
        table.update(content)
