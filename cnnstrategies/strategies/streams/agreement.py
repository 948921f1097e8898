"""Agreement of the processes on the end of an epoch, if a stream divides its samples among the processes itself."""

from collections.abc import Callable, Iterator
from typing import Any

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.streams.part import StreamBatch

Gather = Callable[[list[int]], list[list[int]]]


def until_all_end(
    batches: Iterator[StreamBatch], gather: Gather, name: str, other: Callable[[], Any]
) -> Iterator[StreamBatch]:
    """Yield training batches as long as any process has one. A process without a batch repeats its last batch.

    All processes must use the iterator alike.

    Args:
        batches: The batches of this process.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.
        name: Name of the stream's class, for error messages.
        other: Function that returns any batch of this process, or None if there is none. It is called if all batches of
            this process were used before the run was resumed.

    Yields:
        Batches with the numbers of samples of all processes, and at the end the number of samples that all processes
        have left out.

    Raises:
        ConfigurationError: A process has no batch at all.
    """
    last: StreamBatch | None = None
    left_out = 0
    while True:
        batch = next(batches, None)
        if batch is not None and batch.left_out:
            left_out += batch.left_out
            continue
        rows = gather([0 if batch is None else batch.counts[0], left_out])
        counts = tuple(row[0] for row in rows)
        if any(row[1] for row in rows):
            yield StreamBatch(None, (), sum(row[1] for row in rows))
        left_out = 0
        if not any(counts):
            return
        last = batch or last
        if last is None and (loaded := other()) is not None:
            last = StreamBatch(loaded, counts)
        if last is None:
            raise ConfigurationError(
                f"process {counts.index(0)} has no samples of {name} in this epoch: let it divide its samples among "
                f"all {len(counts)} processes, or use fewer devices"
            )
        yield last._replace(counts=counts)


def until_own_end(
    batches: Iterator[StreamBatch], gather: Gather, name: str, exchanges: Callable[[], int]
) -> Iterator[StreamBatch]:
    """Yield the batches of this process in an evaluation. Other processes may have more.

    If the steps of an evaluation exchange values among the processes, a process with more batches than others would
    wait for them forever, or get the values of another exchange. The iterator refuses this.

    Args:
        batches: The batches of this process.
        gather: Function that sends a row of numbers to all processes, and returns the rows of all processes.
        name: Name of the stream's class, for error messages.
        exchanges: Function that returns the number of exchanges of this process up to now.

    Raises:
        ConfigurationError: The processes have different numbers of batches, and exchange values in each step.
    """
    before = number = 0
    while True:
        batch = next(batches, None)
        while batch is not None and batch.left_out:
            yield batch
            batch = next(batches, None)
        # Lightning fetches a batch ahead, and callbacks may exchange values before the first step.
        now = exchanges()
        in_step, before = number > 1 and now > before, now
        rows = gather([int(batch is not None), int(in_step)])
        if not all(row[0] for row in rows):
            break
        assert batch is not None
        yield batch
        number += 1
    if any(row[0] for row in rows) and any(row[1] for row in rows):
        process = [row[0] for row in rows].index(0)
        raise ConfigurationError(
            f"process {process} has {number} batches of {name} and other processes have more, but each step of this "
            "evaluation waits for all processes, as self.log(..., on_step=True, sync_dist=True) does: log at the end "
            f"of the epoch (on_step=False), or let {name} give each process equally many batches"
        )
    if batch is not None:
        yield batch
        yield from batches
