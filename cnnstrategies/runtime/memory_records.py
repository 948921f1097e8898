"""Small files in which processes of a run note their steps and their memory, because a killed process prints nothing.

The process that has started a killed process reads the killed process's record.
"""

import contextlib
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from cnnstrategies.runtime.out_of_memory import held_bytes

# Environment variable: path of a symbolic link that the first failing rank of this machine creates. The names of the
# records begin with this path.
REFUSED = "CNNSTRATEGIES_REFUSED"
_PREDICTED = "predicted"
_NUMBERS = struct.Struct("<qq")  # A record begins with the step and with the bytes held. JSON follows.


class MemoryRecord:
    """The record of this process. It is kept only if this process is part of a run of the command line.

    The file is mapped into memory, so that a step costs a few microseconds. The system keeps what was written when it
    kills the process.

    Args:
        remedy: What to do if this process has run out of memory.
        rank: This process's rank; -1 for a server.

    Attributes:
        step: Number of steps in the newest record.
    """

    def __init__(self, remedy: str, rank: int = -1) -> None:
        self.step = 0
        self._map = _mapped(str(os.getpid()), json.dumps({"rank": rank, "remedy": remedy}))

    def write(self, step: int) -> None:
        """Note the number of steps that this process has made, and the largest memory that it has held so far."""
        self.step = step
        if self._map is not None:
            _NUMBERS.pack_into(self._map, 0, step, held_bytes())


def record_predictions(peaks: list[str]) -> None:
    """Note the predicted peaks of the run's ranks, in rank order, as texts."""
    _mapped(_PREDICTED, json.dumps(peaks))


def last_record(process: int) -> str:
    """Return a text about the memory of a process of this machine that has been killed; empty without a record.

    Args:
        process: The process's id.
    """
    try:
        numbers, values = _read(str(process))
        step, held = _NUMBERS.unpack(numbers)
    except (OSError, ValueError, struct.error):
        return ""
    predicted = ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        predicted = f" (predicted: {_read(_PREDICTED)[1][values['rank']]})" if values["rank"] >= 0 else ""
    held_then = f"in step {step} it had held {held / 1e6:,.0f} MB of main memory"
    return f"{held_then}{predicted}; if memory has run out, {values['remedy']}"


def remove_records() -> None:
    """Remove the records of all processes that this process has started."""
    link = Path(os.environ[REFUSED])
    for record in link.parent.glob(f"{link.name}_*"):
        record.unlink(missing_ok=True)


def _mapped(name: str, values: str) -> mmap.mmap | None:
    """Create a record with a JSON text, and return it; None outside of a run, or if the file cannot be written."""
    if (link := os.environ.get(REFUSED)) is None:
        return None
    with contextlib.suppress(OSError), open(f"{link}_{name}", "w+b", opener=_opener) as file:
        # The text is written before it is mapped. Without space for it, the map could not be used.
        file.write(_NUMBERS.pack(0, held_bytes()) + values.encode())
        file.flush()
        return mmap.mmap(file.fileno(), 0)
    return None


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _read(name: str) -> tuple[bytes, Any]:
    content = Path(f"{os.environ.get(REFUSED, '')}_{name}").read_bytes()
    return content[: _NUMBERS.size], json.loads(content[_NUMBERS.size :])
