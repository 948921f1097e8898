"""What a strategy may do sooner or later than one device would, because nobody looks in between or all are watched.

On one device each hook of a step finds the gradients and the weights as they are then. A strategy that sends a gradient
before the hooks have run, or takes a value after the step, is right only where no such hook is anybody else's. Those of
Lightning and of this package are known; every other one counts as if it read and wrote all there is.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import Tensor, nn

T = TypeVar("T")
# By which torch's tensors become Python's numbers; and truth values.
READS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__", "__complex__"})
KNOWN = ("lightning.", "cnnstrategies.")  # packages
READERS = (WeightAveraging, ModelPruning)  # of Lightning's, those that read or write weights after each step
# Between backward and the optimizer's step, or in its place.
GRADIENT_HOOKS = ("backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step")
# Between two steps, or around them.
WEIGHT_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step"),
)


def who_sees_gradients(module: LightningModule, callbacks: Iterable[Callback]) -> list[str]:
    """The hooks that may read or change gradients before the optimizer's step, such as ``Clip.on_after_backward``."""
    return [f"{type(one).__name__}.{name}" for one in (module, *callbacks) for name in own_hooks(one, GRADIENT_HOOKS)]


def who_sees_weights(module: LightningModule, callbacks: Iterable[Callback]) -> list[str]:
    """The hooks that may read or change weights between two steps; see :func:`who_sees_gradients`."""
    seen = [f"{type(one).__name__}.{name}" for one in (module, *callbacks) for name in own_hooks(one, WEIGHT_HOOKS)]
    return seen + [type(one).__name__ for one in callbacks if isinstance(one, READERS)]


def own_hooks(one: object, hooks: Iterable[str]) -> list[str]:
    """The hooks of a module or callback that are neither Lightning's nor this package's."""
    found = []
    for name in hooks:
        owner = next((kind for kind in type(one).__mro__ if name in vars(kind)), None)
        if name in vars(one) or (owner is not None and not f"{owner.__module__}.".startswith(KNOWN)):
            found.append(name)
    return found


class WatchedHooks:
    """Has the hooks of a user's own run inside a context, until :meth:`end`.

    Args:
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
