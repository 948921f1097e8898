"""Reading of a stream by a torch loader, with the comparison of its first samples among processes and workers."""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.strategies.streams.part import StreamBatch, StreamPart
from cnnstrategies.strategies.streams.questions import WorkerQuestions
from cnnstrategies.strategies.streams.recognition import StreamDivision, find_division

Gather = Callable[[list[int]], list[list[int]]]


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
