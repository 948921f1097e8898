"""The state of a worker's optimizer, which the servers hold and which a user's code can therefore not read."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer

from cnnstrategies.errors import ConfigurationError


class ServedState(defaultdict[Any, Any]):
    """The state of a worker's optimizer, which is empty, because the servers hold the state.

    Attributes:
        readable: Whether the state may be read. This is so while the optimizer itself steps.
    """

    def __init__(self) -> None:
        super().__init__(dict)
        self.readable = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Allow reads of the state in this context."""
        before, self.readable = self.readable, True
        try:
            yield
        finally:
            self.readable = before


def _checked(name: str) -> Callable[..., Any]:
    """Return a method of ``defaultdict`` that is refused while the state may not be read."""
    method = getattr(defaultdict, name)

    def call(state: ServedState, *args: Any) -> Any:
        if not state.readable:
            raise ConfigurationError(
                "the optimizer's state is read during training, but with strategy parameter_server the servers hold "
                "the state: read it from a checkpoint or after fit, or use `mode: local` or strategy ddp"
            )
        return method(state, *args)

    return call


for _name in ("__getitem__", "__contains__", "__iter__", "__len__", "get", "keys", "values", "items"):
    setattr(ServedState, _name, _checked(_name))


def reading_state(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which the state of an optimizer may be read, even if the servers hold the state."""
    state = optimizer.state
    return state.reading() if isinstance(state, ServedState) else nullcontext()
