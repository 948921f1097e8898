"""Parts of every step that are measured on the host, without waiting for the device."""

from lightning.pytorch import Trainer
from typing_extensions import override

from cnnstrategies.callbacks.slow_changes import CHECKPOINT
from cnnstrategies.recording.actions import CALLBACK, LOADING, SAVING, callback_of
from cnnstrategies.recording.clock import DATA, PartClock, WaitParts
from cnnstrategies.runtime.stopwatch import Stopwatch

COMPUTE = "compute"  # Part of a step without an action of its own.


def host_clock(trainer: Trainer, ignored: str) -> PartClock:
    """Return a running clock for the parts of a trainer's steps: `DATA`, checkpoints and callbacks.

    Args:
        trainer: The trainer, whose profiler is replaced.
        ignored: Class name of the callback that uses the clock, whose hooks are not counted.
    """

    def part_of(action: str) -> str | None:
        if action == SAVING:
            return CHECKPOINT
        if action.endswith(LOADING):
            return DATA
        name = callback_of(action)
        return None if name in (None, ignored) else f"{CALLBACK}{name}"

    clock = PartClock(part_of)
    clock.install(trainer)
    clock.run()
    return clock


class Waits(WaitParts):
    """WaitWatcher that counts this rank's waits for other ranks as one part.

    Args:
        clock: The clock of the host.
        stopwatch: Stopwatch for the device's own time; None on the CPU.
    """

    def __init__(self, clock: PartClock, stopwatch: Stopwatch | None) -> None:
        super().__init__(clock)
        self._stopwatch = stopwatch
        self._holds = False

    @override
    def begin_waiting(self, kind: str) -> None:
        super().begin_waiting(kind)
        if self._stopwatch is not None and not self._holds:
            self._stopwatch.begin_waiting()

    @override
    def end_waiting(self) -> None:
        super().end_waiting()
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
