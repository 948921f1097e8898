"""Recognise that memory has run out, and describe it in one line that names the rank, the step and the peaks."""

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cnnstrategies.errors import causes

# Parts of the messages with which allocators report that memory has run out: torch's for the CPU, for a GPU, and C++.
_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Cannot allocate memory")
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
# The line is a note of the exception, so that it is also in the text of a traceback from a forked or spawned rank.
_MARK = "Out of memory: "
_NOTE = re.compile(rf"^{_MARK}(.+)$", re.MULTILINE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is an allocator's report that memory has run out."""
    return any(
        isinstance(link, MemoryError)
        or (isinstance(link, RuntimeError | OSError) and any(message in str(link) for message in _MESSAGES))
        for link in causes(error)
    )


def held_bytes() -> int:
    """Return the largest number of bytes of main memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


MARGIN = 1.1  # Factor of a predicted peak, because a prediction is not exact.
# A plan, and what each rank takes in a step beyond its parameters, in bytes.
Plan = tuple[str, Sequence[int]]


def plan_that_fits(plans: Sequence[Plan], rank: int, room: int) -> str:
    """Return a text about the first plan that fits by prediction; empty if none does.

    A plan fits if the rank that has run out of memory takes less than its room, and if every other rank takes no more
    than now, or less than this room as well.

    Args:
        plans: The run's own plan, and others.
        rank: The rank that has run out of memory.
        room: Bytes that the rank can take beyond its parameters.
    """
    if not plans:
        return ""
    (_, of_run), *others = plans
    # The run's own plan did not fit, whatever the room seems to be.
    most = min(room, of_run[rank]) / MARGIN
    for settings, needed in others:
        if needed[rank] <= most and all(new <= max(most, old) for new, old in zip(needed, of_run, strict=True)):
            return f"a plan that fits by prediction: {settings} ({needed[rank] / 1e6:,.0f} MB beside the parameters)"
    return ""


@dataclass(frozen=True)
class OutOfMemory:
    """Facts about a process that has run out of memory.

    Attributes:
        process: Name of the process, such as ``rank 1``.
        host: Name of the process's machine.
        step: Number of the optimizer's steps that the process has made.
        peak: Text with the largest number of bytes that the process has held.
        predicted: Text with the predicted peak; empty if it is not known.
        remedy: Text that says what to do.
    """

    process: str
    host: str
    step: int
    peak: str
    predicted: str
    remedy: str

    def attach(self, error: BaseException) -> Self:
        """Add the line to an error, unless the error has one."""
        if line_of(error) is None:
            request = next((match[1] for link in causes(error) if (match := _REQUEST.search(str(link)))), None)
            asked = f", and asked for {request} more" if request else ""
            predicted = f" (predicted: {self.predicted})" if self.predicted else ""
            error.add_note(
                f"{_MARK}{self.process} on {self.host} has run out of memory in step {self.step}: it had held "
                f"{self.peak}{predicted}{asked}; {self.remedy}"
            )
        return self


def line_of(error: BaseException) -> str | None:
    """Return the line that :meth:`OutOfMemory.attach` has added to an error or to one of its causes; None without one.

    If the error is that of a forked or spawned rank, its message contains the rank's traceback with the line.
    """
    texts = [text for link in causes(error) for text in (*getattr(link, "__notes__", ()), str(link))]
    return next((match[1] for text in texts if (match := _NOTE.search(text))), None)
