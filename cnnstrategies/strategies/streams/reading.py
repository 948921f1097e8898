"""Reading of a stream by a torch loader, with a comparison of its first samples, or by a loader with its own division.

The workers of a torch loader compare the first samples of the stream with those of other workers and processes.
LitData's ``StreamingDataLoader`` divides the stream in its own way.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.strategies.streams.part import StreamBatch, StreamPart
from cnnstrategies.strategies.streams.recognition import StreamDivision, find_division

Gather = Callable[[list[int]], list[list[int]]]


class WorkerQuestions:
    """Pipes by which the workers of a loader send descriptions of their first samples, and get the stream's division.

    Args:
        context: Context of multiprocessing in which the workers are started.
        workers: Number of workers.
    """

    def __init__(self, context: Any, workers: int) -> None:
        pairs = [context.Pipe() for _ in range(workers)]
        self._answering: list[Connection] = [pair[0] for pair in pairs]
        self._asking: list[Connection] = [pair[1] for pair in pairs]

    def ask(self, worker: int, row: list[int]) -> StreamDivision:
        """Send the description of a worker's first samples, and wait for the answer. A worker calls this."""
        self._asking[worker].send(row)
        return StreamDivision(*self._asking[worker].recv())

    def answer(self, decide: Callable[[Sequence[list[int]]], StreamDivision]) -> StreamDivision:
        """Wait for all workers' descriptions, answer them, and return the answer.

        The process that has started the workers calls this. If a worker dies, torch's handler of SIGCHLD raises an
        error while this method waits.

        Args:
            decide: Function that takes the descriptions of all workers and returns the stream's division.
        """
        answer = StreamDivision(by_process=True, by_worker=True)
        try:
            answer = decide([connection.recv() for connection in self._answering])
        finally:  # A worker that waits for an answer would not end.
            for connection in self._answering:
                connection.send(tuple(answer))
            for connection in self._answering + self._asking:
                connection.close()
        return answer


class StreamReader:
    """Reader of one process's part of a stream through a copy of the user's loader.

    Attributes:
        part: Data set that yields this process's batches. It is the data set of ``loader``.
        loader: Copy of the user's loader.
        first: Description of the first samples of the first process; empty if the processes have not compared samples.
        is_alone: Whether other processes did not take part in the comparison, because they had begun earlier.

    Args:
        loader: The user's loader.
        part: Data set that yields this process's batches.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.
    """

    def __init__(self, loader: DataLoader[Any], part: StreamPart, gather: Gather) -> None:
        self.part = part
        self.loader = copy.copy(loader)
        # torch does not allow to set some of these attributes.
        changed = {"dataset": part, "batch_size": None, "batch_sampler": None, "drop_last": False}
        vars(self.loader).update(changed, collate_fn=unchanged, _iterator=None)
        self.first: list[int] = []
        self.is_alone = False
        self._gather = gather
        self._random_numbers: GeneratorStates | None = None

    def start(self, epoch: int) -> Iterator[StreamBatch]:
        """Return an iterator of this process's batches of an epoch. In the first epoch all processes must call this."""
        part, workers = self.part, self.loader.num_workers
        part.epoch = epoch
        self._random_numbers = None
        if part.division is not None:
            batches = self._batches(iter(self.loader))
            part.skip = [0] * len(part.skip)  # The iterator's workers have copies of the data set.
            return batches
        if not workers:
            part.ask = lambda worker, row: self._decide([row])
            batches = self._batches(iter(self.loader))
            first = next(batches, None)
            part.ask = None
            return batches if first is None else chain([first], batches)
        context = self.loader.multiprocessing_context or torch.multiprocessing
        questions = WorkerQuestions(context, workers)
        part.ask = questions.ask
        batches = self._batches(iter(self.loader))
        part.ask, part.skip = None, [0] * len(part.skip)
        part.division = questions.answer(self._decide)
        return batches

    def load_state_dict(self, state: Any) -> None:
        """Continue in the next epoch from a state of the loader."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]  # A loader that has a state has the method.

    def restart(self) -> None:
        """Start workers again in the next epoch, if the loader has persistent workers."""
        vars(self.loader)["_iterator"] = None

    def any_batch(self) -> Any:
        """Return a batch with the first sample of the stream, or None if the stream has no samples."""
        for sample in self.part.stream:
            return self.part.collate([sample] if self.part.batch_size else sample)
        return None

    def _batches(self, batches: Iterator[StreamBatch]) -> Iterator[StreamBatch]:
        if self.loader.num_workers:
            return batches
        return self._with_own_random_numbers(batches)

    def _with_own_random_numbers(self, batches: Iterator[StreamBatch]) -> Iterator[StreamBatch]:
        """Yield batches that are loaded in this process, without a change of its random numbers by the stream.

        If the processes read the same stream, they must draw equal random numbers for it.
        """
        while True:
            states = GeneratorStates.current(CPU) if self.part.draws_alike else None
            if states is not None and self._random_numbers is not None:
                self._random_numbers.restore(CPU)
            batch = next(batches, None)
            if states is not None:
                self._random_numbers = GeneratorStates.current(CPU)
                states.restore(CPU)
            if batch is None:
                return
            yield batch

    def _decide(self, rows: Sequence[list[int]]) -> StreamDivision:
        """Return whether the stream divides its samples itself. All processes must call this.

        Args:
            rows: Descriptions of the first samples of this process's workers.
        """
        name = type(self.part.stream).__name__
        heads = self._gather([self.part.process, len(rows)])
        if len({workers for _, workers in heads}) > 1:
            raise ConfigurationError(
                f"the loaders of {name} have {', '.join(str(workers) for _, workers in heads)} workers in the "
                "processes: use the same num_workers in all processes"
            )
        gathered = self._gather([number for row in rows for number in row])
        size = len(rows[0])
        described = [[row[start : start + size] for start in range(0, len(row), size)] for row in gathered]
        self.first = described[0][0]
        self.is_alone = len(described) == 1 < self.part.processes
        if self.is_alone:
            rank_zero_warn(
                f"this process was started again alone and cannot compare {name} with the other processes: it keeps "
                "its part of the stream, as if the stream did not divide its samples itself"
            )
        return find_division(described, [replica for replica, _ in heads], name)


def unchanged(batch: Any) -> Any:
    """Return a batch. It takes the place of a loader's function that makes a batch from samples."""
    return batch


def can_be_divided(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads its data set in torch's way, so that a part of the data set can take its place.

    This is the case for torch's own loader and for torchdata's StatefulDataLoader, and for classes derived from them
    that do not iterate in their own way.
    """
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    stateful = None if torchdata is None else torchdata.StatefulDataLoader.__iter__
    return type(loader).__iter__ in (DataLoader.__iter__, stateful)


class OwnReader:
    """Reader of the batches that a user's loader yields in this process.

    The number of samples of a batch is known when the loader has yielded the batch. A run that resumes continues from
    the loader's own state, if it has one, and needs the same numbers of processes and workers.

    Attributes:
        part: Facts about this process's part of the stream. The loader does not read it.
        loader: The user's loader.
        first: An empty list, because the processes do not compare samples.

    Args:
        loader: The user's loader.
        part: Facts about this process's part of the stream.
    """

    def __init__(self, loader: Any, part: StreamPart) -> None:
        self.loader, self.part = loader, part
        self.first: list[int] = []
        self._has_begun = self._has_state = False

    def start(self, epoch: int) -> Iterator[StreamBatch]:
        """Return an iterator of this process's batches of an epoch."""
        self.part.division = StreamDivision(by_process=True, by_worker=True)
        loader, has_state, is_resumed = self.loader, self._has_state, not self._has_begun
        self._has_begun, self._has_state = True, False
        if not has_state and getattr(loader, "restore", False):
            # LitData's loader begins a new epoch only if the epoch before was asked for a batch after the last one.
            # Lightning does not ask if it knows the number of batches.
            loader.restore = False
        if is_resumed and not has_state and isinstance(getattr(loader, "current_epoch", None), int):
            loader.current_epoch = epoch  # LitData's loader adds 1.
        return self._batches()

    def load_state_dict(self, state: Any) -> None:
        """Continue in the next epoch from a state of the loader."""
        self.loader.load_state_dict(state)
        self._has_state = True

    def restart(self) -> None:
        """Do nothing. The loader starts its workers itself."""

    def any_batch(self) -> Any:
        """Return a batch that does not belong to the current epoch, or None if the loader has none."""
        loader = self.loader
        epoch = getattr(loader, "current_epoch", None)
        batch = next(iter(loader), None)
        if epoch is not None:
            loader.current_epoch = epoch  # LitData's loader has begun the next epoch.
        return batch

    def _batches(self) -> Iterator[StreamBatch]:
        for batch in self.loader:
            yield StreamBatch(batch, (count_samples(batch) or 1,))
