"""Send the values that a module logs to all ranks, those of a step in one message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from cnnstrategies._lightning_private import last_value_of, set_last_value
from cnnstrategies.placed import Places, RefusedError
from cnnstrategies.strategies.hybrid_pipeline.connections import everywhere

# Name, value, copy of the value or last value of the metric, and other arguments of `log`.
_Entry = tuple[str, Any, Any, tuple[Any, ...], dict[str, Any]]


class PlacedLogs:
    """Replaces a module's method ``log``, until :meth:`remove`.

    Progress bars and loggers read logged values on rank 0 alone, so all ranks must have these values. Values that a
    step logs are logged at the end of the step. Of a metric, these values are its value for the batch and, whenever
    Lightning or the user computes it, its result.

    Args:
        module: The module.
        places: The rules of this rank.
    """

    def __init__(self, module: LightningModule, places: Places) -> None:
        self._module, self._places = module, places
        self._module_log = module.log
        self._pending: list[_Entry] | None = None
        # By id, because a metric's hash changes with its states: logged metrics and their own methods `compute`.
        self._metrics: dict[int, tuple[Metric, Callable[..., Any]]] = {}
        # Each access to a method makes a new object, which would count as a change of the module.
        self._own_log = vars(module)["log"] = self._log

    def remove(self) -> None:
        """Give the module and its metrics their own methods back."""
        vars(self._module).pop("log", None)
        for metric, compute in self._metrics.values():
            metric.compute = compute  # type: ignore[method-assign]
        self._metrics.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for a step. At its end, the values are logged that the step has logged."""
        self._pending = []
        try:
            yield
            pending = self._pending
        finally:
            self._pending = None
        self._log_all(pending, "log")

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Return a context in which the module's ``log`` does nothing."""
        vars(self._module)["log"] = _log_nothing
        try:
            yield
        finally:
            vars(self._module)["log"] = self._own_log

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._places.active:
            raise RefusedError(
                f"the forward of a layer logs {name!r}, but it runs for each microbatch, and only on the ranks of its "
                "stage: store the value in an attribute of the layer, and log it in the module's step"
            )
        if isinstance(value, Metric):
            self._share_results(value)
        values = last_value_of(value) if isinstance(value, Metric) else value
        if all(self._places.place_of(leaf) is None for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            self._log_now(name, value, values, args, kwargs)
            return
        # The step may change a tensor later.
        kept = tree_map_only(Tensor, self._places.copy_of, values)
        if self._pending is None:
            self._log_all([(name, value, kept, args, kwargs)], f"log {name}")
        else:
            self._pending.append((name, value, kept, args, kwargs))

    def _log_all(self, entries: list[_Entry], why: str) -> None:
        """Bring values to all ranks in one message, and log them."""
        copies = everywhere(self._places, [values for _, _, values, _, _ in entries], why)
        for (name, value, _, args, kwargs), values in zip(entries, copies, strict=True):
            self._log_now(name, value, values, args, kwargs)

    def _log_now(self, name: str, value: Any, copies: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Log a value of which all ranks have copies."""
        if isinstance(value, Metric):
            set_last_value(value, copies)
            self._module_log(name, value, *args, **kwargs)
            return
        with self._places.local():  # All ranks have the operands of Lightning's operations, so no rules are needed.
            self._module_log(name, copies, *args, **kwargs)

    def _share_results(self, metric: Metric) -> None:
        """From now on, give all ranks what a metric computes."""
        if id(metric) in self._metrics:
            return
        metric_compute = metric.compute
        self._metrics[id(metric)] = metric, metric_compute

        def compute(*args: Any, **kwargs: Any) -> Any:
            return everywhere(self._places, metric_compute(*args, **kwargs), "metric")

        metric.compute = compute  # type: ignore[method-assign]


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of ``log``."""
