"""Clock that measures the parts of every step on the host, without waiting for the device."""

import time
from types import TracebackType

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from cnnstrategies.callbacks.slow_changes import CHECKPOINT
from cnnstrategies.strategies.stopwatch import Stopwatch

CALLBACK = "[Callback]"
SAVING = "save_checkpoint"  # Name of the action in which the trainer saves a checkpoint.
LOADING = "train_dataloader_next"  # Last part of the name of the action in which a batch is loaded.
DATA, COMPUTE, WAITED, REST = "data", "compute", "waited", "rest"
Part = tuple[dict[str, float], str]  # The dictionary that counts the part's time, and the part's name in it.


class HostClock(Profiler):
    """Profiler that counts the host's time of the parts of each step, for the innermost open part.

    The profiler's actions are `DATA`, checkpoints and callbacks. Other parts are opened by :meth:`open`. The remaining
    time is `REST`. The clock replaces the trainer's profiler and forwards all calls to it. Its contexts are not
    generators, which saves about as much time as the clock takes.

    Args:
        user: The trainer's profiler.
        ignored: Class name of the callback that uses the clock, whose hooks are not counted.

    Attributes:
        seconds: Time of each part so far, in seconds, apart from callbacks.
        callbacks: Time of each callback's hooks so far, in seconds. Keys are names of classes.
    """

    def __init__(self, user: Profiler, ignored: str) -> None:
        super().__init__()
        self.user = user
        self.seconds: dict[str, float] = {}
        self.callbacks: dict[str, float] = {}
        self._ignored = ignored
        # By action: the dictionary and the name of its part; None for an action without a part.
        self._parts: dict[str, Part | None] = {}
        self._open: list[Part] = [(self.seconds, REST)]
        self._mark = time.perf_counter()

    @override
    def profile(self, action_name: str) -> "_ActionContext":  # type: ignore[override]  # A faster context.
        return _ActionContext(self, action_name)

    @override
    def start(self, action_name: str) -> None:
        self.user.start(action_name)
        if action_name not in self._parts:
            self._parts[action_name] = self._part(action_name)
        if (part := self._parts[action_name]) is not None:
            self.read()
            self._open.append(part)

    @override
    def stop(self, action_name: str) -> None:
        if self._parts.get(action_name) is not None:
            self.close()
        self.user.stop(action_name)

    def open(self, name: str) -> None:
        """Open a part that no action contains."""
        self.read()
        self._open.append((self.seconds, name))

    def close(self) -> None:
        """Close the innermost part."""
        self.read()
        if len(self._open) > 1:
            self._open.pop()

    def read(self) -> float:
        """Count the time until now, and return the time in seconds."""
        now = time.perf_counter()
        times, name = self._open[-1]
        times[name] = times.get(name, 0.0) + now - self._mark
        self._mark = now
        return now

    def _part(self, action: str) -> Part | None:
        if action == SAVING:
            return self.seconds, CHECKPOINT
        if action.endswith(LOADING):
            return self.seconds, DATA
        if action.startswith(CALLBACK):
            name = action.removeprefix(CALLBACK).rpartition(".")[0].partition("{")[0].rpartition(".")[2]
            return None if name == self._ignored else (self.callbacks, name)
        return None


class _ActionContext:
    """Context of an action of the profiler."""

    __slots__ = ("_clock", "_name")

    def __init__(self, clock: HostClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> str:
        self._clock.start(self._name)
        return self._name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clock.stop(self._name)


class Waits:
    """WaitWatcher that counts this rank's waits for other ranks as the part `WAITED`.

    Args:
        clock: The clock of the host.
        stopwatch: Stopwatch for the device's own time; None on the CPU.
    """

    def __init__(self, clock: HostClock, stopwatch: Stopwatch | None) -> None:
        self._clock = clock
        self._stopwatch = stopwatch
        self._holds = False

    def begin_waiting(self, kind: str) -> None:
        """Begin a wait."""
        self._clock.open(WAITED)
        if self._stopwatch is not None and not self._holds:
            self._stopwatch.begin_waiting()

    def end_waiting(self) -> None:
        """End the wait."""
        self._clock.close()
        if self._stopwatch is not None and not self._holds:
            self._stopwatch.end_waiting()

    def hold(self, *args: object) -> None:
        """Begin the wait for the sums of DDP's gradients, which may contain other waits."""
        if not self._holds:
            self.begin_waiting("gradients")
            self._holds = True

    def release(self) -> None:
        """End the wait for the sums of the gradients."""
        if self._holds:
            self._holds = False
            self.end_waiting()
