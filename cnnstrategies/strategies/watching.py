"""What looking at a user's code has in common: whose hooks, which tensors, and what a tensor was made of."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from cnnstrategies.strategies.licences import own_hooks

T = TypeVar("T")
# By which torch's tensors become Python's numbers; and truth values.
READS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__", "__complex__"})


class WatchedHooks:
    """Has the hooks of a user's own run inside a context, until :meth:`end`.

    Args:
        owners: The module and the callbacks that may have some.
        hooks: The names of those that are watched.
        inside: Makes the context of a hook from what it is called, such as ``Clip.on_after_backward``.
    """

    def __init__(
        self, owners: Iterable[Any], hooks: Iterable[str], inside: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self._inside = inside
        self._wrapped = [(one, name) for one in owners for name in own_hooks(one, hooks)]
        for one, name in self._wrapped:
            vars(one)[name] = partial(self._run, f"{type(one).__name__}.{name}", getattr(one, name))

    def end(self) -> None:
        """Watch no more."""
        for one, name in self._wrapped:
            vars(one).pop(name, None)

    def _run(self, hook: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._inside(hook):
            return function(*args, **kwargs)


class Origins(Generic[T]):
    """What tensors were made of, for as long as they live; parameters are themselves."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[Tensor], T]] = {}  # by id, which another may have later

    def note(self, origin: T, results: Iterable[Any]) -> None:
        """All tensors among some results were made of that."""
        for tensor in tensors_in(results):
            if not isinstance(tensor, nn.Parameter):
                self._noted[id(tensor)] = weakref.ref(tensor), origin

    def of(self, tensor: Tensor, default: T) -> T:
        """What a tensor was made of."""
        noted = self._noted.get(id(tensor))
        return noted[1] if noted is not None and noted[0]() is tensor else default


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among a function's arguments or results, those in lists and tuples, too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
