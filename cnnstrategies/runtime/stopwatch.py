"""A stopwatch for a rank's own time: the time between two moments, without the waits for other ranks."""

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch


@dataclass(frozen=True)
class Measured:
    """Measured times of one run of a stopwatch, for example of a step.

    Attributes:
        seconds: Seconds from the start to the end.
        waited: Seconds of them for which the rank waited for other ranks.
        work: Units of work of the rank.
    """

    seconds: float
    waited: float
    work: float

    @property
    def own(self) -> float:
        """Seconds for which the rank did not wait: it loaded, computed, ran callbacks or saved checkpoints."""
        return self.seconds - self.waited


@dataclass
class _Marks:
    """Marks of one run: times in seconds on a CPU, events on a GPU."""

    start: Any
    end: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # Begin and end of each wait.
    work: float = 0.0


class Stopwatch:
    """Stopwatch that a rank starts and stops in each step or microbatch. It can measure waits for other ranks.

    As a watcher of :mod:`cnnstrategies.runtime.waiting`, the stopwatch measures all waits that are reported there. On a
    GPU all times come from CUDA events. An event is read only after the GPU has reached the event, so the CPU never
    waits for the GPU.

    Args:
        device: This rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._current: _Marks | None = None  # Marks of the current run; None if the stopwatch is stopped.
        self._wait: Any = None  # Begin of the open wait; None if the rank is not waiting.
        self._ended: deque[_Marks] = deque()

    def begin(self) -> None:
        """Start the stopwatch. A current run is discarded."""
        self._current, self._wait = _Marks(self._now()), None

    def end(self, work: float = 1.0) -> None:
        """Stop the stopwatch if it is running.

        Args:
            work: Units of work of this rank since the start.
        """
        current, self._current = self._current, None
        if current is not None:
            current.end, current.work = self._now(), work
            self._ended.append(current)

    def discard(self) -> None:
        """Stop the stopwatch without a measurement, for example because a validation runs."""
        self._current = None

    def clear(self) -> None:
        """Discard the measurements that :meth:`take` would return."""
        self._ended.clear()

    def begin_waiting(self, kind: str = "gradients") -> None:
        """Mark the begin of a wait, unless a wait is open."""
        if self._current is not None and self._wait is None:
            self._wait = self._now()

    def end_waiting(self) -> None:
        """Mark the end of the open wait, if there is one."""
        if self._current is not None and self._wait is not None:
            self._current.waits.append((self._wait, self._now()))
        self._wait = None

    def take(self) -> list[Measured]:
        """Return the measurements since the last call, one for each run.

        On a GPU the newest measurements may be missing, because the GPU has not finished this work. A later call
        returns them.
        """
        measured = []
        while self._ended and self._is_complete(self._ended[0]):
            marks = self._ended.popleft()
            waited = sum(self._between(*wait) for wait in marks.waits)
            measured.append(Measured(self._between(marks.start, marks.end), waited, marks.work))
        return measured

    def _is_complete(self, marks: _Marks) -> bool:
        """Return whether the device has reached all events of a run. Waits may lie in other streams than its end."""
        return not self._on_device or all(event.query() for event in (marks.end, *(end for _, end in marks.waits)))

    def take_mean(self) -> float:
        """Return the mean of the rank's own seconds in all that :meth:`take` would return; 0 without measurements."""
        return mean([run.own for run in self.take()] or [0.0])

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000 if self._on_device else end - start)
