"""Keep metrics from adding up what several ranks have counted, since each rank counts the whole batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchmetrics import Metric


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
