"""Recording of a rank's timeline: its own work between collectives, and the time that it spends in each collective."""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import torch
import torchmetrics
from typing_extensions import override

import cnnstrategies
from cnnstrategies.planning.scaling.timeline import (
    BARRIER,
    BATCH,
    BUFFERS,
    EXCHANGE,
    GRADIENTS,
    INTERNAL,
    LOG,
    ROWS,
    SUMS,
    WAITING,
)
from cnnstrategies.recording.clock import PartClock, WaitParts
from cnnstrategies.runtime.waiting import only_starts
from cnnstrategies.strategies.spatial import waits
from cnnstrategies.strategies.spatial.waits import kind_of_wait

# Folders of libraries. A collective belongs to the line of code outside of these folders that runs it.
LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        sysconfig.get_paths()["stdlib"],
        *(Path(module.__file__ or "").parent for module in (torch, lightning, torchmetrics, cnnstrategies)),
    )
)

# Kinds of collectives of ranks that have parts of the same images.
KINDS = {waits.SHARE: BATCH, waits.ROWS: ROWS, waits.SUMS: SUMS}


def kind_and_place(frame: FrameType | None, name: str) -> tuple[str, str]:
    """Return the kind of a collective, and the line of the user's code that runs it.

    Args:
        frame: The innermost frame of the call stack.
        name: Name of the wait, as in :class:`~cnnstrategies.runtime.waiting.WaitWatcher`.

    Returns:
        The kind, and the line as ``file:line``. The line is empty if only libraries have run the collective.
    """
    if name == "buffers":
        return BUFFERS, ""
    if (kind := KINDS.get(kind_of_wait(frame) or "")) is not None:
        return kind, ""
    kind = BARRIER if "barrier" in name else EXCHANGE
    # The callers of Lightning's loop belong to the program that trains, and not to a step.
    while frame is not None and not frame.f_code.co_filename.endswith("fit_loop.py"):
        code = frame.f_code
        if not code.co_filename.startswith((*LIBRARIES, "<")):
            return kind, f"{Path(code.co_filename).name}:{frame.f_lineno}"
        if code.co_name == "log" and code.co_filename.endswith("module.py"):
            kind = LOG
        frame = frame.f_back
    return INTERNAL, ""


class TimelineRecorder(WaitParts):
    """WaitWatcher of a rank's waits that records the rank's timeline.

    Args:
        clock: The clock that counts the time of each part of a step. Waits become parts of a step.

    Attributes:
        segments: The segments so far, as keyword arguments of
            :class:`~cnnstrategies.planning.scaling.timeline.Segment`.
    """

    def __init__(self, clock: PartClock) -> None:
        super().__init__(clock)
        self.segments: list[dict[str, Any]] = []
        self._before: Mapping[str, float] = {}
        self._current: tuple[str, str] | None = None  # Kind and place of the collective in which the rank is.

    @override
    def part_of(self, frame: FrameType, kind: str) -> str | None:
        if only_starts(frame):
            return None
        self._current = kind_and_place(frame, kind)
        return WAITING + self._current[0]

    @override
    def end_waiting(self) -> None:
        super().end_waiting()
        if self._current is not None:
            self._append(*self._current)
            self._current = None

    def end_backward(self) -> None:
        """Note that the gradients' all-reduce has ended with a backward pass. Its time is not known yet."""
        self.clock.read()
        self._append(GRADIENTS, "")

    def end(self, visible: list[float]) -> None:
        """End the timeline.

        Args:
            visible: Seconds of the gradients' all-reduces that do not overlap with the backward pass. If the last of
                them are missing, their mean is used for the missing ones.
        """
        self.clock.read()
        self._append("", "")
        mean = sum(visible) / max(1, len(visible))
        reduces = [segment for segment in self.segments if segment["collective"] == GRADIENTS]
        for index, segment in enumerate(reduces):
            waited = visible[index] if index < len(visible) else mean
            segment["waited"] = waited
            segment["work"]["backward"] = max(0.0, segment["work"].get("backward", 0.0) - waited)

    def _append(self, kind: str, place: str) -> None:
        now = dict(self.clock.seconds)
        since = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items()}
        self._before = now
        waited = sum(seconds for name, seconds in since.items() if name.startswith(WAITING))
        work = {name: seconds for name, seconds in since.items() if seconds and not name.startswith(WAITING)}
        self.segments.append({"work": work, "collective": kind, "waited": waited, "place": place})
