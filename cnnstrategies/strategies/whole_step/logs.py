"""Send the values that a module logs to all ranks, those of a step in one message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.placed import Places


class PlacedLogs:
    """Replaces a module's method ``log``, until :meth:`remove`.

    Progress bars and loggers read logged values on rank 0 alone, so all ranks must have these values. Values that a
    step logs are logged at the end of the step.

    Args:
        module: The module.
        places: The rules of this rank.
    """

    def __init__(self, module: LightningModule, places: Places) -> None:
        self._module, self._places = module, places
        self._own = module.log
        self._pending: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] | None = None
        vars(module)["log"] = self._log

    def remove(self) -> None:
        """Give the module its own method back."""
        vars(self._module).pop("log", None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for a step. At its end, the values are logged that the step has logged."""
        self._pending = []
        try:
            yield
            pending = self._pending
        finally:
            self._pending = None
        leaves = [leaf for _, value, _, _ in pending for leaf in tree_leaves(value)]
        copies = self._places.all_everywhere([leaf for leaf in leaves if isinstance(leaf, Tensor)], "log")
        for name, value, args, kwargs in pending:
            self._own(name, tree_map(lambda leaf: copies.get(id(leaf), leaf), value), *args, **kwargs)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        if all(self._places.place_of(leaf) is None for leaf in leaves):
            self._own(name, value, *args, **kwargs)
        elif self._pending is None:
            detached = [leaf.detach() for leaf in leaves]
            copies = self._places.all_everywhere(detached, f"log {name}")
            of_leaf = {id(leaf): copies.get(id(copy), copy) for leaf, copy in zip(leaves, detached, strict=True)}
            self._own(name, tree_map(lambda leaf: of_leaf.get(id(leaf), leaf), value), *args, **kwargs)
        else:
            # The step may change the tensor later.
            kept = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)
            self._pending.append((name, kept, args, kwargs))
