"""The largest batch of a step that fits into the memory of all devices, by prediction."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from cnnstrategies.planning.candidates import Candidate, Job
from cnnstrategies.planning.hybrid import hybrids
from cnnstrategies.planning.parameter_server import ParameterServer
from cnnstrategies.planning.rank import data_parallel
from cnnstrategies.planning.spatial import spatial

# Strategies with which the largest batch is searched if no configuration names one.
FAMILIES: tuple[str, ...] = ("ddp", "ddp_balanced", "hybrid", "parameter_server", "spatial")


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits.

    Attributes:
        samples: Number of samples in a step over all devices.
        row: The candidate with which the batch fits. Its peaks are those of this batch.
    """

    samples: int
    row: Candidate


def largest_of(job: Job, families: Collection[str], most: int, more_than: int = 0) -> Largest | None:
    """Return the largest batch that fits with a strategy of ``families``; None if no batch fits.

    Gradient accumulation is left out, because with it any batch fits if one sample fits on each device.

    Args:
        job: Network and cluster. The number of samples is ignored.
        families: Names of strategies, such as ``ddp`` or ``hybrid``.
        most: Largest number of samples of a step.
        more_than: Look only for batches with more samples than this number.
    """

    def rows(job_of_size: Job) -> Iterator[Candidate]:
        simple = itertools.chain(
            data_parallel(job_of_size), ParameterServer(job_of_size).candidates(), spatial(job_of_size)
        )
        pipelines = hybrids(job_of_size) if "hybrid" in families else ()
        return itertools.chain((row for row in simple if row.family in families), pipelines)

    return _largest(job, most, rows, more_than)


def _largest(job: Job, most: int, rows: Callable[[Job], Iterator[Candidate]], more_than: int) -> Largest | None:
    """Find the largest batch by doubling and bisection. A larger batch needs more memory on every device."""

    def fitting(samples: int) -> Candidate | None:
        return next(
            (
                row
                for row in rows(replace(job, samples=samples))
                if "accumulate_grad_batches" not in row.options and not job.excess(row.memories)
            ),
            None,
        )

    if more_than >= most:
        return None
    best, low, high = None, more_than, min(max(job.cluster.devices, more_than + 1), most)
    while (row := fitting(high)) is not None:
        best, low = Largest(high, row), high
        if high == most:
            return best
        high = min(2 * high, most)
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        if (row := fitting(middle)) is not None:
            best, low = Largest(middle, row), middle
        else:
            high = middle
    return best
