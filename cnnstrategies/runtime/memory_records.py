"""Small files in which processes of a run note their steps and their memory, because a killed process prints nothing.

The process that has started a killed process reads the killed process's record.
"""

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cnnstrategies.runtime.out_of_memory import Plan, held_bytes, plan_that_fits
from cnnstrategies.runtime.process_ids import is_ending

# Environment variable: path of a symbolic link that the first failing rank of this machine creates. The names of the
# records begin with this path.
REFUSED = "CNNSTRATEGIES_REFUSED"
_PREDICTED = "predicted"
_STARTED = time.time()
_NOTHING: tuple[Sequence[str], Sequence[Plan]] = (), ()
_NUMBERS = struct.Struct("<qq")  # A record begins with the step and with the bytes held. JSON follows.


class MemoryRecord:
    """The record of this process. It is kept only if this process is part of a run of the command line.

    The file is mapped into memory, so that a step costs a few microseconds. The system keeps what was written when it
    kills the process.

    Args:
        remedy: What to do if this process has run out of memory.
        rank: This process's rank; -1 for a server.
        available: Bytes of main memory that this process may hold, as far as it is known.
        launch: Text that is the same for all ranks of a run, and differs between two runs at the same time.

    Attributes:
        step: Number of steps in the newest record.
        base: Bytes that this process has held before the first step.
    """

    def __init__(self, remedy: str, rank: int = -1, available: int = 0, launch: str = "") -> None:
        self.step, self.base = 0, held_bytes()
        values = {"rank": rank, "remedy": remedy, "base": self.base, "available": available, "launch": launch}
        values["time"] = time.time()
        self._map = _mapped(str(os.getpid()), json.dumps(values))

    def write(self, step: int) -> None:
        """Note the number of steps that this process has made, and the largest memory that it has held so far."""
        self.step = step
        if self._map is not None:
            _NUMBERS.pack_into(self._map, 0, step, held_bytes())


def record_predictions(peaks: Sequence[str], plans: Sequence[Plan] = ()) -> None:
    """Note the predicted peaks of the run's ranks, in rank order, as texts, and plans; see `plan_that_fits`."""
    _mapped(_PREDICTED, json.dumps([peaks, plans]))


def recorded_predictions(link: str | None = None) -> tuple[Sequence[str], Sequence[Plan]]:
    """Return what :func:`record_predictions` has noted; empty without a record.

    Args:
        link: Beginning of the record's path; by default that of this process's run.
    """
    with contextlib.suppress(OSError, ValueError):
        peaks, plans = _read(_PREDICTED, link)[1]
        return peaks, plans
    return _NOTHING


def last_record(process: int) -> str:
    """Return a text about the memory of a process of this machine that has been killed; empty without a record.

    Args:
        process: The process's id.
    """
    try:
        return _described(_read(str(process)), recorded_predictions())
    except (OSError, ValueError, struct.error):
        return ""


def killed_sibling(launch: str) -> tuple[int, str] | None:
    """Return the rank, and the text of :func:`last_record`, of a killed rank of this machine.

    A rank that ends by itself removes its record, so a record without a process is that of a killed rank. Of several
    processes that call this function, one gets the result, because it removes the record. The result is None if
    no rank was killed.

    Args:
        launch: See :class:`MemoryRecord`.
    """
    link = os.environ.get(REFUSED, "")
    killed, predictions = [], _NOTHING
    for path in Path(link).parent.glob(f"{Path(link).name.partition('_')[0]}_*_*_*"):
        prefix, _, number = str(path).rpartition("_")
        with contextlib.suppress(OSError, ValueError, KeyError, struct.error):
            if not number.isdigit():
                continue
            record = _read(number, prefix)
            # A rank creates its record after it has met this rank. Older records are from before a restart.
            if record[1]["launch"] != launch or record[1]["time"] < _STARTED:
                continue
            if record[1]["rank"] == 0:
                predictions = recorded_predictions(prefix)
            if record[1]["rank"] >= 0 and is_ending(int(number)):
                killed.append((path, record))
    for path, record in killed:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            return record[1]["rank"], _described(record, predictions)
    return None


def _described(record: tuple[bytes, Any], predictions: tuple[Sequence[str], Sequence[Plan]]) -> str:
    (step, held), values = _NUMBERS.unpack(record[0]), record[1]
    predicted, remedy = "", values["remedy"]
    with contextlib.suppress(IndexError):
        if (rank := values["rank"]) >= 0:
            predicted = f" (predicted: {predictions[0][rank]})"
            # The newest record is from before the step in which the process has been killed.
            room = max(held, values["available"]) - values["base"]
            remedy = plan_that_fits(predictions[1], rank, room) or remedy
    held_then = f"in step {step} it had held {held / 1e6:,.0f} MB of main memory"
    return f"{held_then}{predicted}; if memory has run out, {remedy}"


def remove_records() -> None:
    """Remove the records of all processes that this process has started."""
    link = Path(os.environ[REFUSED])
    for record in link.parent.glob(f"{link.name}_*"):
        record.unlink(missing_ok=True)


def exit_at_once(code: int) -> NoReturn:
    """End this process without its cleanups. Its record is removed, so that no rank takes it for a killed process."""
    remove_record()
    os._exit(code)


def remove_record() -> None:
    """Remove the record of this process, which ends by itself."""
    Path(f"{os.environ.get(REFUSED, '')}_{os.getpid()}").unlink(missing_ok=True)


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


def _read(name: str, link: str | None = None) -> tuple[bytes, Any]:
    content = Path(f"{os.environ.get(REFUSED, '') if link is None else link}_{name}").read_bytes()
    return content[: _NUMBERS.size], json.loads(content[_NUMBERS.size :])
