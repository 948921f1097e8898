"""The state of a worker's optimizer, which the servers hold and which a user's code can therefore not read."""

from collections import defaultdict
from collections.abc import Iterator
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

    def _check(self) -> None:
        if not self.readable:
            raise ConfigurationError(
                "the optimizer's state is read during training, but with strategy parameter_server the servers hold "
                "the state: read it from a checkpoint or after fit, or use `mode: local` or strategy ddp"
            )

    def __getitem__(self, key: Any) -> Any:
        """Return the state of a parameter, if the state may be read."""
        self._check()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        """Whether there is a state of a parameter, if the state may be read."""
        self._check()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the parameters that have a state, if the state may be read."""
        self._check()
        return super().__iter__()

    def __len__(self) -> int:
        """Return the number of parameters that have a state, if the state may be read."""
        self._check()
        return super().__len__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter or the default, if the state may be read."""
        self._check()
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the parameters that have a state, if the state may be read."""
        self._check()
        return super().keys()

    def values(self) -> Any:
        """Return the states of all parameters, if they may be read."""
        self._check()
        return super().values()

    def items(self) -> Any:
        """Return the parameters and their states, if the states may be read."""
        self._check()
        return super().items()


def reading_state(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which the state of an optimizer may be read, even if the servers hold the state."""
    state = optimizer.state
    return state.reading() if isinstance(state, ServedState) else nullcontext()
