"""A clock that splits time among named parts, and a tap on the actions that Lightning announces to its profiler."""

import time
from collections.abc import Callable, Mapping

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override


class PartClock:
    """Splits the time while it runs among parts that may lie within each other.

    Each moment counts once: for the innermost part that is open, or for ``rest`` where none is.

    Args:
        device: Where the work runs. On an accelerator every reading waits until its queue is empty, so that a kernel
            counts for the part that launched it.
        rest: Name for the time outside all parts.
        inner: Time that others have measured within the parts: for each of their names the seconds so far. It counts
            for that name instead of the part in which it passed.

    Attributes:
        seconds: Time of each part so far.
        running: Whether time is being counted.
        open_parts: Those that have begun and not ended, the innermost last.
    """

    def __init__(
        self, device: torch.device, rest: str = "other", inner: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.running = False
        self._device = device
        self._rest = rest
        self._inner = inner
        self._inner_before: Mapping[str, float] = {}
        self.open_parts: list[str] = []
        self._mark = 0.0

    def start(self) -> None:
        """Count from now on. Call it outside all parts."""
        self.running = True
        self.open_parts.clear()
        self._mark = self._now()
        self._inner_before = dict(self._inner())

    def stop(self) -> None:
        """Count no longer; the time since the last reading counts for no part."""
        self.running = False

    def read(self) -> None:
        """Count what has passed since the last reading."""
        if self.running:
            now = self._now()
            passed = now - self._mark
            self._mark = now
            inner = dict(self._inner())
            for name, seconds in inner.items():
                since = seconds - self._inner_before.get(name, 0.0)
                self._count(name, since)
                passed -= since
            self._inner_before = inner
            self._count(self.open_parts[-1] if self.open_parts else self._rest, passed)

    def begin(self, part: str) -> None:
        """Open a part."""
        self.read()
        self.open_parts.append(part)

    def end(self) -> None:
        """Close the part that was opened last."""
        self.read()
        if self.open_parts:
            self.open_parts.pop()

    def _count(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class ActionTap(Profiler):
    """Passes Lightning's actions on to the user's profiler and reports some of them.

    Lightning announces what it does to ``trainer.profiler`` by names such as ``[Strategy]DDPStrategy.backward``.

    Args:
        inner: The profiler that had this place.
        parts: The part that each action stands for, by the end of its name after the last dot.
        on_start: Called with the part when one of these actions starts.
        on_stop: Called with the part when it has ended.
    """

    def __init__(
        self,
        inner: Profiler,
        parts: Mapping[str, str],
        on_start: Callable[[str], None],
        on_stop: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._on_start = on_start
        self._on_stop = on_stop

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        part = self._parts.get(action_name.rpartition(".")[2])
        if part is not None:
            self._on_start(part)

    @override
    def stop(self, action_name: str) -> None:
        part = self._parts.get(action_name.rpartition(".")[2])
        if part is not None:
            self._on_stop(part)
        self.inner.stop(action_name)
