"""Metrics on all ranks: one message for each update, and no sums over ranks, since each counts the whole batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from cnnstrategies._lightning_private import keeps_graph
from cnnstrategies.placed import Places
from cnnstrategies.strategies.hybrid_pipeline.connections import everywhere

# Largest number of bytes of the arguments of a metric's update that are sent to all ranks. A metric with larger
# arguments computes where they are, and each state that changes is sent.
SMALL = 1 << 20


def share_metrics(places: Places, holders: Iterable[Any]) -> Callable[[], None]:
    """Make metrics have their states and compute their values on all ranks.

    Without this function, metrics compute the same values by the rules for placed tensors. Their states are tensors of
    all ranks, so each operation that changes a state needs a message. With it, an update needs one message, and a
    metric's values can be read without messages.

    Args:
        places: The rules of this rank.
        holders: The module, and callbacks.

    Returns:
        Function that undoes the changes.
    """
    changes = [_change(places, metric) for metric in _metrics_in(list(holders), set())]

    def undo() -> None:
        for change in changes:
            change()

    return undo


def _change(places: Places, metric: Metric | MetricCollection) -> Callable[[], None]:
    """Change one metric, and return a function that undoes the changes."""
    if isinstance(metric, MetricCollection):

        def bring_arguments(_: Any, args: Any, kwargs: Any) -> Any:
            needs_graph = any(map(_has_gradient, metric.values(copy_state=False)))
            return share(places, (args, kwargs), needs_graph)

        # One message is enough for all metrics of the collection.
        return metric.register_forward_pre_hook(bring_arguments, with_kwargs=True).remove
    attributes = vars(metric)
    before = {name: attributes[name] for name in ("update", "compute")}
    update, compute = before["update"], before["compute"]

    @wraps(update)
    def update_everywhere(*args: Any, **kwargs: Any) -> None:
        args, kwargs = share(places, (args, kwargs), needs_graph=keeps_graph(metric) and _has_gradient(metric))
        update(*args, **kwargs)

    @wraps(compute)
    def compute_everywhere(*args: Any, **kwargs: Any) -> Any:
        return share(places, compute(*args, **kwargs), needs_graph=keeps_graph(metric), is_limited=False)

    attributes |= {"update": update_everywhere, "compute": compute_everywhere}
    return partial(attributes.update, before)


def _has_gradient(metric: Metric) -> bool:
    """Whether the value of a batch may be used as a loss."""
    return metric.is_differentiable is not False and not isinstance(metric, BaseAggregator)


def share(places: Places, value: Any, needs_graph: bool = False, is_limited: bool = True) -> Any:
    """Return nested containers with copies of placed tensors on all ranks, which do not have a gradient.

    Args:
        places: The rules of this rank.
        value: The containers.
        needs_graph: Whether tensors that require a gradient are left at their places.
        is_limited: Whether at most `SMALL` bytes are sent. More bytes are left at their places.
    """
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if places.place_of(leaf) is not None]
    if needs_graph and any(tensor.requires_grad for tensor in tensors):
        return value
    if not tensors or not places.active or (is_limited and sum(tensor.nbytes for tensor in tensors) > SMALL):
        return value
    return everywhere(places, value, "metric")


def _metrics_in(value: Any, seen: set[int]) -> Iterator[Metric | MetricCollection]:
    """Yield the metrics in a module or callback, in its submodules, and in lists, tuples and dictionaries."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (Metric, MetricCollection)):
        yield value
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, (nn.Module, Callback)):
        items = vars(value).values()
    for item in items:
        if isinstance(item, (nn.Module, Callback, Mapping, list, tuple)):
            yield from _metrics_in(item, seen)


@contextmanager
def metrics_of_one_process() -> Iterator[None]:
    """Return a context in which metrics do not synchronise, as in one process.

    The method of the class is replaced, because callbacks and steps may create metrics at any time.
    """
    synchronise = Metric.sync
    Metric.sync = _stay  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Metric.sync = synchronise  # type: ignore[method-assign]


def _stay(metric: Metric, *_: Any, **__: Any) -> None:
    """Leave a metric's states as they are."""
