"""Measure the spans of a rank's steps: what the rank does in its stage, and for how long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cnnstrategies.pipeline.timeline import Clock, Span
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport


class TaskTimes:
    """Reports the spans of a rank's stage to watchers, and runs stopwatches.

    Attributes:
        device: Device of this rank's stage.
        watchers: Functions that are called with each span. Without watchers no times are measured. On a GPU, measuring
            a span synchronises the device at its start and at its end.
        clocks: Stopwatches, by the kind of the spans that they measure, or ``loss`` for the loss of a microbatch.
            Starting and stopping them must not wait for the device. The stopwatches run only in calls of the network
            whose backward follows.

    Args:
        transport: Connections of this rank.
    """

    def __init__(self, transport: Transport) -> None:
        self.device = transport.device
        self.watchers: list[Callable[[Span], None]] = []
        self.clocks: dict[str, list[Clock]] = {}
        self._transport = transport

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks, and the microbatches of each rank."""
        return self._transport.placement

    @contextmanager
    def timed(self, kind: str, microbatch: int | None = None, clock: str | None = None) -> Iterator[None]:
        """Return a context for the code of a span. Spans must not be nested.

        Args:
            kind: Kind of the span.
            microbatch: The microbatch; None if the span belongs to the whole step.
            clock: Kind of the stopwatches that measure the span as well, if any do.
        """
        clocks = [] if clock is None else self.clocks.get(clock, [])
        start = self._now() if self.watchers else 0.0
        for stopwatch in clocks:
            stopwatch.begin()
        yield
        for stopwatch in clocks:
            stopwatch.end()
        if self.watchers:
            self._report(kind, microbatch, start, self._now())

    def note_wait(self, kind: str, start: float, end: float) -> None:
        """Report that this process has waited for another rank.

        Args:
            kind: Kind of the span.
            start: Start of the wait, in the time of ``time.time``.
            end: End of the wait.
        """
        self._report(kind, None, start, end)

    def _report(self, kind: str, microbatch: int | None, start: float, end: float) -> None:
        span = Span(self._transport.rank, kind, self._transport.place.stage, microbatch, start, end)
        for watcher in self.watchers:
            watcher(span)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.time()  # All ranks on a machine share this clock, so the times of their spans can be compared.
