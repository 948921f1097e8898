"""The position of a process in an epoch of a stream, and what a checkpoint says about it."""

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.streams.part import StreamPart, is_stateful
from cnnstrategies.strategies.streams.reading import OwnReader, StreamReader
from cnnstrategies.strategies.streams.recognition import StreamDivision

KEPT = 4  # Number of batches after which the loader's state is known. Lightning fetches one batch ahead.


class EpochPosition:
    """Numbers of batches and samples that this process has used in an epoch, and the states of the user's loader.

    Attributes:
        epoch: Number of the epoch; -1 before the first one.
        batches: Number of batches of the epoch, with those before a resume.
        used: For each worker, the number of the stream's samples that it has used for batches or left out.
        is_exhausted: Whether the epoch has no more batches.
    """

    def __init__(self) -> None:
        self.epoch, self.is_exhausted = -1, False
        self.batches = 0
        self.used = [0]
        self._used_before: dict[int, list[int]] = {}  # By batch: the numbers before the batch.
        self._states: dict[int, Any] = {}

    def begin(self, epoch: int, workers: int) -> None:
        """Begin an epoch.

        Args:
            epoch: Number of the epoch.
            workers: Number of workers that read the stream.
        """
        self.epoch, self.is_exhausted = epoch, False
        self.batches, self.used = 0, [0] * workers
        self._states.clear()

    def continue_here(self) -> None:
        """Note that the epoch continues after the batches and samples that have been set."""
        self._used_before = {self.batches: list(self.used)}

    def add(self, worker: int, samples: int) -> None:
        """Add a batch.

        Args:
            worker: The worker that has read it.
            samples: Number of samples of the stream in it.
        """
        self.batches += 1
        self.used[worker] += samples
        self._used_before[self.batches] = list(self.used)
        self._used_before.pop(self.batches - KEPT, None)

    def keep_state(self, state: Any) -> None:
        """Keep the state of the user's loader after the last batch."""
        self._states[self.batches] = copy.deepcopy(state)  # LitData's loader returns the same dictionary again.
        self._states.pop(self.batches - KEPT, None)

    def state_after(self, batches: int) -> Any:
        """Return the kept state of the user's loader after a number of batches; None if there is none."""
        return self._states.get(batches)

    def numbers_after(self, batches: int) -> dict[str, Any]:
        """Return the position after a number of batches, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "batches": batches,
            "used": self._used_before.get(batches, self.used),
            "ended": self.is_exhausted and batches == self.batches,
        }


def gather_states(state: Any, gather: Callable[[list[int]], list[list[int]]]) -> list[Tensor]:
    """Return the states of the loaders of all processes, in rank order. All processes must call this.

    Args:
        state: State of this process's loader; None if the loader has not begun.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.

    Returns:
        The bytes of each state, uint8 (bytes,). The list is empty if a loader has not begun.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = list(buffer.getvalue())
    sizes = [size if has_state else 0 for size, has_state in gather([len(data), state is not None])]
    if not all(sizes):
        return []
    rows = gather(data + [0] * (max(sizes) - len(data)))
    return [torch.tensor(row[:size], dtype=torch.uint8) for row, size in zip(rows, sizes, strict=True)]


def state_of_rank(states: Sequence[Tensor], rank: int) -> Any:
    """Return the state of one process's loader from the result of :func:`gather_states`."""
    return torch.load(io.BytesIO(states[rank].numpy().tobytes()), weights_only=True)


def division_of(resume: dict[str, Any] | None) -> StreamDivision:
    """Return the stream's division in the run that saved a state."""
    by_process, by_worker = (False, False) if resume is None else resume["division"]
    return StreamDivision(bool(by_process), bool(by_worker))


def continue_epoch(resume: dict[str, Any], position: EpochPosition, reader: OwnReader | StreamReader, rank: int) -> int:
    """Continue after the batches of a checkpoint. Return the number of batches to load and to leave out.

    Args:
        resume: The state in the checkpoint.
        position: The position in the epoch, which this function sets.
        reader: The reader of this process's part of the stream.
        rank: This process's rank.

    Raises:
        ConfigurationError: The stream divides its samples itself, and the numbers of processes or workers differ.
    """
    position.batches = resume["batches"]
    part, workers = reader.part, reader.loader.num_workers
    then, now = [resume["processes"], resume["workers"]], [part.processes, workers]
    division = division_of(resume)
    if then == now and resume["states"] and is_stateful(reader.loader):
        part.division, reader.first = division, resume["first"]
        reader.load_state_dict(state_of_rank(resume["states"], rank))
        position.used = list(resume["used"])
        return 0
    if division == (False, False):
        position.used = [sum(resume["used"]), *[0] * (len(position.used) - 1)]
        part.skip = [position.used[0]] * len(position.used)
        if part.draws_alike and not resume["draws_alike"]:
            rank_zero_warn(
                f"if the order of {type(part.stream).__name__} is random, it differs from that of the run that saved "
                "the checkpoint, which one process read: samples of this epoch may then be repeated or left out; "
                "resume with one process, or from a checkpoint of an epoch's end"
            )
        part.draws_alike |= resume["draws_alike"]
        return 0
    if then == now:
        return position.batches
    if division.by_process or then[1] != now[1]:
        refuse(resume, part, workers)
    # Each worker continues with its own part of the stream.
    position.used = list(resume["used"])
    part.skip = list(position.used)
    return 0


def refuse(resume: dict[str, Any] | None, part: StreamPart, workers: int) -> NoReturn:
    """Raise a ConfigurationError, because a process does not know which samples of an epoch are left.

    Args:
        resume: The state with which the epoch continues.
        part: The process's part of the stream.
        workers: Number of workers that read it.
    """
    assert resume is not None, "batches before this run come from a checkpoint"
    then = f"{resume['processes']} processes with {resume['workers']} workers"
    raise ConfigurationError(
        f"the checkpoint was saved within epoch {resume['epoch']} by {then}, and {type(part.stream).__name__} divides "
        f"its samples among them itself, so that {part.processes} processes with {workers} workers cannot know "
        f"which samples are left: resume with {then}, or from a checkpoint of an epoch's end"
    )
