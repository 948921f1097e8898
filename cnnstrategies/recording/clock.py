"""Clock that measures the time of each part of a training step, also of the waits for other ranks."""

import functools
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from typing_extensions import override

# Parts of a step: loading a batch, waiting for other ranks, and the time in which no part is open.
DATA, WAITED, OTHER = "data", "waited", "other"


class PartClock(Profiler):
    """Profiler that measures the time of each part of a step. Parts may be nested.

    The clock temporarily replaces the trainer's profiler, and forwards all calls to it. Time counts for the innermost
    open part, or for ``other`` if no part is open. The strategy itself measures some parts, such as a worker's wait for
    parameters. The time of such a part is subtracted from the open part. If a device is given, it is synchronised
    whenever a part begins or ends, so that the time of a kernel counts for the part that launched the kernel. Contexts
    of actions are not generators, which saves about as much time as the clock takes.

    Args:
        part_of: Function that maps the name of a profiler action to a part of the step, or to None for an action that
            belongs to no part. It is called once for each name.
        device: The rank's device; None to measure the host's time without waiting for the device.
        inner: Function that returns the total time so far of each part that the strategy measures, in seconds. None if
            the strategy does not measure parts.

    Attributes:
        user: The trainer's profiler.
        seconds: Time of each part so far, in seconds.
        running: Whether the clock is counting.
        wanted: Whether the clock starts when the next batch is loaded.
        open_parts: Names of the open parts, the innermost last.
    """

    def __init__(
        self,
        part_of: Callable[[str], str | None],
        device: torch.device | None = None,
        inner: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__()
        self.user: Profiler = PassThroughProfiler()
        self.seconds: dict[str, float] = {}
        self.running = self.wanted = False
        self.open_parts: list[str] = []
        self._part_of = functools.cache(part_of)
        self._device = None if device is None or device.type == "cpu" else device
        self._inner = inner
        self._mark = 0.0
        self._inner_before: Mapping[str, float] = {}

    def install(self, trainer: Trainer) -> None:
        """Replace a trainer's profiler."""
        self.user = trainer.profiler  # type: ignore[attr-defined]  # set outside the class
        trainer.profiler = self  # type: ignore[attr-defined]

    def remove(self, trainer: Trainer) -> None:
        """Restore a trainer's profiler. The measured times are kept."""
        self.running = self.wanted = False
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if profiler is self:
            trainer.profiler = self.user  # type: ignore[attr-defined]
        elif getattr(profiler, "user", None) is self:  # Another clock has replaced this one since.
            profiler.user = self.user

    @override
    def profile(self, action_name: str) -> "_ActionContext":  # type: ignore[override]  # A faster context.
        return _ActionContext(self, action_name)

    @override
    def start(self, action_name: str) -> None:
        self.user.start(action_name)
        if (part := self._part_of(action_name)) is not None:
            if self.wanted and not self.running and part == DATA:
                self.run()
            self.begin(part)

    @override
    def stop(self, action_name: str) -> None:
        if self._part_of(action_name) is not None:
            self.end()
        self.user.stop(action_name)

    def run(self) -> None:
        """Start counting the time of each part. Call this when no part is open."""
        self.running = True
        self.open_parts.clear()
        self._mark = self._now()
        if self._inner is not None:
            self._inner_before = dict(self._inner())

    def pause(self) -> None:
        """Stop counting the time of each part, and discard the time since the last call of :meth:`read`."""
        self.running = False

    def read(self) -> None:
        """Add the time since the last call of this method to the times of the parts."""
        if not self.running:
            return
        now = time.perf_counter() if self._device is None else self._now()
        seconds, passed = self.seconds, now - self._mark
        self._mark = now
        if self._inner is not None:
            inner = dict(self._inner())
            for name, total in inner.items():
                since = total - self._inner_before.get(name, 0.0)
                seconds[name] = seconds.get(name, 0.0) + since
                passed -= since
            self._inner_before = inner
        part = self.open_parts[-1] if self.open_parts else OTHER
        seconds[part] = seconds.get(part, 0.0) + passed

    def begin(self, part: str) -> None:
        """Open a part, which may lie within another open part. Time counts only for the innermost open part."""
        self.read()
        self.open_parts.append(part)

    def end(self) -> None:
        """Close the part that was opened last."""
        self.read()
        if self.open_parts:
            self.open_parts.pop()

    def _now(self) -> float:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class _ActionContext:
    """Context of an action of the profiler."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: PartClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> str:
        self._clock.start(self._name)
        return self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clock.stop(self._name)


class WaitParts:
    """WaitWatcher that makes the waits of a rank parts of a step.

    Args:
        clock: The clock that counts the time of each part of a step.
    """

    def __init__(self, clock: PartClock) -> None:
        self.clock = clock
        self._open = 0  # Number of waits that have begun a part.

    def part_of(self, frame: FrameType, kind: str) -> str | None:
        """Return the part of a wait; None if the wait does not count. By default all waits are one part.

        Args:
            frame: The innermost frame of the call stack.
            kind: Kind of the wait, as in :class:`~cnnstrategies.runtime.waiting.WaitWatcher`.
        """
        return WAITED

    def begin_waiting(self, kind: str) -> None:
        """Begin a part of the step."""
        part = self.part_of(sys._getframe(1), kind) if self.clock.running else None  # noqa: SLF001
        if part is not None:
            self._open += 1
            self.clock.begin(part)

    def end_waiting(self) -> None:
        """End the part of the step."""
        if self._open:
            self._open -= 1
            self.clock.end()
