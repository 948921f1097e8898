"""Data set that yields the batches of one worker of one process from a stream of samples."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.seeds import mixed_seed, seed_all
from cnnstrategies.strategies.streams.recognition import FIRST, ROW, StreamDivision, describe_samples

UNDIVIDED = StreamDivision(by_process=False, by_worker=False)


class StreamBatch(NamedTuple):
    """Batch of one process, with facts about the global batch.

    Attributes:
        batch: The batch. It is None if samples at the end of the stream are left out.
        counts: Number of samples of each process in the global batch. If the stream divides its samples among the
            processes itself, only this process's number is known. A process whose number is 0 repeats a sample.
        left_out: Number of samples of the stream that are in no batch, because ``drop_last`` is set.
        worker: Number of the worker that has loaded the batch.
        first: Position in the stream of the global batch's first sample; -1 if the stream divides its samples itself,
            or yields batches.
    """

    batch: Any
    counts: tuple[int, ...]
    left_out: int = 0
    worker: int = 0
    first: int = -1


class StreamPart(IterableDataset[StreamBatch]):
    """Data set that yields one worker's batches of one process.

    The samples of a stream that does not divide them itself are divided like the rows of batches on one device: with R
    processes and batches of B samples, the global batch k has the samples k R B to (k + 1) R B - 1. Process r takes
    every R-th of them, beginning with the r-th. Worker w of W workers loads the global batches w, w + W, w + 2 W and so
    on. The division therefore does not depend on the number of workers, and no sample is in two batches.

    All workers of all processes read the whole stream with equal random seeds, so that they agree on its order.

    Attributes:
        division: Whether the stream divides its samples itself; None if this is not known yet.
        draws_alike: Whether all workers of all processes draw equal random numbers for the stream.
        epoch: Number of the next epoch.
        skip: Number of samples that the next epoch leaves out at the beginning of the stream, for each worker.
        ask: Function that takes the number of a worker and the description of its first samples, and returns the
            division. It is called in the worker.

    Args:
        stream: The user's data set.
        batch_size: Number of samples in a batch of a process; None if the stream yields batches.
        collate: The function of the user's loader that makes a batch from a list of samples, or from one batch.
        drop_last: Whether to leave out a last global batch with fewer samples.
        processes: Number of processes.
        process: Number of this process.
        workers: Number of workers of the loader.
        is_evaluation: Whether each process must have the same number of batches without repeated samples. The last
            batches may then have one sample more.
        fills: Whether a process without samples in the last global batch repeats a sample. If not, it has no batch.
        seed: Seed of the random numbers that the stream draws.
    """

    ask: Callable[[int, list[int]], StreamDivision] | None = None

    def __init__(
        self,
        stream: Any,
        batch_size: int | None,
        collate: Callable[[Any], Any],
        drop_last: bool,
        processes: int,
        process: int,
        workers: int,
        is_evaluation: bool,
        fills: bool,
        seed: int,
    ) -> None:
        self.stream, self.batch_size, self.collate, self.drop_last = stream, batch_size, collate, drop_last
        self.processes, self.process = processes, process
        self.is_evaluation, self.fills, self.seed = is_evaluation, fills, seed
        self.epoch = 0
        self.skip = [0] * max(1, workers)
        self.division = UNDIVIDED if processes == 1 and workers < 2 else None
        self.draws_alike = self.division is None
        self._begun = self._dealt = 0  # Samples of the stream before the first batch, and in all batches so far.
        self._number = 0  # Number of the worker.
        self._ahead = 0  # Number of samples that were compared before they were dealt.
        self._iterator: Iterator[Any] = iter(())
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[StreamBatch]:
        """Return an iterator of this worker's batches of the next epoch."""
        epoch, skip, loaded = self.epoch, self.skip, self._loaded
        self.epoch, self.skip, self._loaded = epoch + 1, [0] * len(skip), None
        return self._batches(epoch, skip, loaded)

    def _batches(self, epoch: int, skip: Sequence[int], loaded: dict[str, Any] | None) -> Iterator[StreamBatch]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        before = GeneratorStates.current(CPU)
        if self.draws_alike:
            seed_all(mixed_seed(self.seed, epoch))
        self._begun, self._dealt, self._ahead, self._number = skip[number], skip[number], 0, number
        if loaded is not None:
            self._begun, self._dealt = loaded["begun"], loaded["dealt"]
        state = None if loaded is None else loaded["stream"]
        if state is not None and is_stateful(self.stream):
            self.stream.load_state_dict(state)
        self._iterator = iter(self.stream)
        if state is not None and not is_stateful(self.stream):
            self._iterator.load_state_dict(state)  # type: ignore[attr-defined]
        samples = _remaining(self._iterator)
        if self.division is None:
            samples = self._compare(number, samples)
        if state is None and self._dealt:
            samples = islice(samples, self._dealt, None)
        if self.division == (True, True) and self.draws_alike:
            # The stream itself may need other random numbers in each worker, for its augmentation.
            before.restore(CPU)
            self.draws_alike = False
        yield from self._deal(samples, number, workers)

    def _compare(self, number: int, samples: Iterator[Any]) -> Iterator[Any]:
        """Find out whether the stream divides its samples itself, and return an iterator of all samples."""
        assert self.ask is not None
        first: list[Any] = []
        try:
            first += islice(samples, FIRST)
        except BaseException:
            self.ask(number, [0] * ROW)  # The loader waits for all workers.
            raise
        self.division = self.ask(number, describe_samples(first))
        self._ahead = len(first)
        return chain(first, samples)

    def _deal(self, samples: Iterator[Any], number: int, workers: int) -> Iterator[StreamBatch]:
        assert self.division is not None
        ranks, rank = (1, 0) if self.division.by_process else (self.processes, self.process)
        takers, taker = (1, 0) if self.division.by_worker else (workers, number)
        size = ranks * (self.batch_size or 1)
        holds_back = self.is_evaluation and ranks > 1 and not self.drop_last
        place = self._dealt - self._begun
        mine: list[Any] = []  # This process's samples of the current global batch.
        counts = [0] * ranks
        waiting: tuple[int, list[Any], list[int]] | None = None  # The global batch before, which may get more samples.
        sample: Any = None
        for sample in samples:
            index, row = divmod(place, size)
            place += 1
            counts[row % ranks] += 1 if self.batch_size else count_samples(sample) or 1
            if row % ranks == rank and (index % takers == taker or (holds_back and row < ranks)):
                mine.append(sample)
            if waiting is not None and row + 1 == ranks:
                if waiting[0] % takers == taker:
                    yield self._batch(waiting[1], waiting[2], sample, place - ranks)
                waiting = None
                if index % takers != taker:
                    mine.clear()
            if row + 1 < size:
                continue
            if holds_back:
                waiting = index, mine, counts
            elif index % takers == taker:
                yield self._batch(mine, counts, sample, place)
            mine, counts = [], [0] * ranks
        index, rest = divmod(place, size)
        if waiting is not None:
            index, rest = waiting[0], 1
            mine, counts = waiting[1] + mine, [sum(pair) for pair in zip(waiting[2], counts, strict=True)]
        if not rest or index % takers != taker:
            return
        if self.drop_last:
            yield StreamBatch(None, (), sum(counts))
            return
        if holds_back and not all(counts):
            raise ConfigurationError(
                f"{sum(counts)} samples of {type(self.stream).__name__} cannot be evaluated by {ranks} processes, "
                "because each process needs at least one sample: use fewer devices, or more data"
            )
        if mine or self.fills:
            yield self._batch(mine, counts, sample, place)

    def _batch(self, samples: list[Any], counts: list[int], other: Any, place: int) -> StreamBatch:
        """Return a batch of samples. If there are none, the batch has a sample of another process.

        Args:
            samples: This process's samples.
            counts: Number of samples of each process.
            other: A sample of the global batch.
            place: Number of samples of the stream in all global batches up to this one, without skipped samples.
        """
        self._dealt = self._begun + place
        rows = samples or [other]
        batch = self.collate(rows if self.batch_size else rows[0])
        is_known = self.batch_size and self.division == UNDIVIDED
        first = self._dealt - sum(counts) if is_known else -1
        return StreamBatch(batch, tuple(counts), worker=self._number, first=first)

    # torchdata's StatefulDataLoader saves and restores the state of each worker's data set by these methods.

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, and the stream's own state if it has one."""
        holder = next(filter(is_stateful, (self.stream, self._iterator)), None)
        # The stream has yielded more samples than are dealt while its first samples are compared.
        is_exact = self._dealt - self._begun >= self._ahead
        state = holder.state_dict() if holder is not None and is_exact else None
        return {"begun": self._begun, "dealt": self._dealt, "stream": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state that this worker of this process has saved."""
        self._loaded = dict(state)


def _remaining(samples: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining samples of an iterator without calling ``iter``, which starts some streams again."""
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


def is_stateful(holder: Any) -> bool:
    """Whether an object has a state that can be saved and restored."""
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")
