"""Run a rank's tasks in order, and measure the spans of its steps: what the rank does in its stage, for how long."""

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.timeline import Clock, Span
from cnnstrategies.pipeline.timetable import Placement, Task
from cnnstrategies.pipeline.transport import Transport

_NOT_MEASURED = nullcontext()


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

    def timed(self, kind: str, microbatch: int | None = None, clock: str | None = None) -> AbstractContextManager[None]:
        """Return a context for the code of a span. Spans must not be nested.

        Args:
            kind: Kind of the span.
            microbatch: The microbatch; None if the span belongs to the whole step.
            clock: Kind of the stopwatches that measure the span as well, if any do.
        """
        clocks = [] if clock is None else self.clocks.get(clock, [])
        return self._measured(kind, microbatch, clocks) if clocks or self.watchers else _NOT_MEASURED

    @contextmanager
    def _measured(self, kind: str, microbatch: int | None, clocks: Sequence[Clock]) -> Iterator[None]:
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


def run_tasks(
    channels: Channels,
    tasks: Sequence[Task],
    size: Callable[[int], Hashable],
    ahead: int,
    run: Callable[[Task], None],
    timed: Callable[[str, int], AbstractContextManager[object]],
) -> None:
    """Run tasks in order, and begin sends and receives before the first task and after each task.

    Args:
        channels: The messages of this rank's stage.
        tasks: Tasks of the rank.
        size: Function that returns the size key of a microbatch; see `Channels.plan`.
        ahead: Number of turns before a task at which the receive of the task's message begins; see
            :data:`~cnnstrategies.pipeline.channels.AHEAD`.
        run: Function that runs a task.
        timed: Function of a kind and a microbatch that returns a context for the code of a span.
    """
    channels.plan(tasks, size)
    times = [*map(channels.turn, tasks), *[math.inf] * (ahead + 1)]
    channels.exchange(times[0], times[ahead])
    for index, task in enumerate(tasks):
        try:
            run(task)
            with timed("send", task.microbatch):
                channels.exchange(times[index + 1], times[index + 1 + ahead])
        except Exception as error:
            error.add_note(f"in {channels.transport.me}: {task.kind} of microbatch {task.microbatch}")
            raise
