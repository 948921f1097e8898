"""Functions that deal: they divide a number of samples or microbatches among ranks by the ranks' shares.

Samplers, pipelines, evaluation, the planner and the simulator use these functions.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from math import inf

from cnnstrategies.errors import ConfigurationError

NORMALISED_TOGETHER = 8  # Smallest number of images for which batch normalisation gets a useful mean and variance.


def deal(samples: int, shares: Sequence[float], least: int = 0, most: float | Sequence[float] = inf) -> tuple[int, ...]:
    """Divide samples among ranks in proportion to the ranks' shares.

    Numbers are rounded by the largest-remainder method. Among ranks with equal remainders, lower ranks come first.

    Args:
        samples: Number of samples to divide.
        shares: Share of each rank, above 0. Only the ratios of the shares matter.
        least: Smallest number of samples of a rank, if there are enough samples for all ranks.
        most: Largest number of samples of a rank: one number for all ranks, or an integer for each rank.

    Returns:
        The number of samples of each rank. The sum is ``samples``.

    Raises:
        ConfigurationError: There are more samples than all ranks can hold.
    """
    ranks = len(shares)
    least = min(least, samples // ranks)
    mosts = most if isinstance(most, Sequence) else [most] * ranks
    if sum(mosts) < samples:
        raise ConfigurationError(
            f"{samples} samples cannot be divided among {ranks} processes that hold at most {most} each: use at most "
            f"{sum(mosts)} samples"
        )
    ideal = [samples * share / sum(shares) for share in shares]
    fixed: dict[int, int] = {}
    while True:
        # In each iteration, either all ranks below `least` are raised to `least`, or all ranks above `most` are lowered
        # to `most`: the change that moves more samples in total. The remaining samples are then divided again among the
        # ranks that were not changed.
        bound = {rank: max(least, min(ideal[rank], mosts[rank])) for rank in range(ranks) if rank not in fixed}
        off = {rank: number - ideal[rank] for rank, number in bound.items()}
        sign = 1 if sum(off.values()) >= 0 else -1
        bounded = [rank for rank, difference in off.items() if difference * sign > 0]
        if not bounded:
            break
        fixed |= {rank: round(bound[rank]) for rank in bounded}
        free = [rank for rank in range(ranks) if rank not in fixed]
        left, whole = samples - sum(fixed.values()), sum(shares[rank] for rank in free)
        for rank in free:
            ideal[rank] = left * shares[rank] / whole
    return tuple(_rounded(samples, [fixed.get(rank, number) for rank, number in enumerate(ideal)]))


@lru_cache(maxsize=4096)
def soonest(count: int, speeds: tuple[float, ...], most: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Divide microbatches among replicas so that the replica that finishes last finishes as early as possible.

    Each replica gets at least one microbatch if there are enough microbatches.

    Args:
        count: Number of microbatches.
        speeds: Speed of each replica, in microbatches per unit of time.
        most: Largest number of microbatches of each replica; their sum must be at least `count`. An empty tuple means
            that there are no limits.

    Returns:
        The number of microbatches of each replica.
    """
    counts = [min(1, count // len(speeds))] * len(speeds)
    queue = [
        ((number + 1) / speed, replica) for replica, (number, speed) in enumerate(zip(counts, speeds, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(count - sum(counts)):
        while most and counts[queue[0][1]] >= most[queue[0][1]]:
            heapq.heappop(queue)
        replica = queue[0][1]
        counts[replica] += 1
        heapq.heapreplace(queue, ((counts[replica] + 1) / speeds[replica], replica))
    return tuple(counts)


def _rounded(total: int, ideal: Sequence[float]) -> list[int]:
    counts = [int(number) for number in ideal]
    by_rest = sorted(range(len(ideal)), key=lambda index: (counts[index] - ideal[index], index))
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


def turns(counts: Sequence[int]) -> list[list[int]]:
    """Return the positions of each rank's samples in a global batch.

    The samples are assigned to the ranks in turn, until each rank has its number of samples. With equal numbers, rank r
    of R ranks has the positions r, r + R, r + 2 R and so on.

    Args:
        counts: Number of samples of each rank.
    """
    places: list[list[int]] = [[] for _ in counts]
    place = 0
    for turn in range(max(counts, default=0)):
        for rank, count in enumerate(counts):
            if turn < count:
                places[rank].append(place)
                place += 1
    return places


@lru_cache(maxsize=256)  # The planner calls this many times with the same arguments.
def rotation(shares: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Return the rank that runs each microbatch, in the order of the microbatches.

    The method is smooth weighted round-robin, which spreads the microbatches of each rank evenly over the batch. With
    equal shares, microbatch m goes to rank ``m mod R``. Each rank gets at least one microbatch if there are enough
    microbatches.

    Args:
        shares: Share of each of the R ranks.
        count: Number of microbatches.
    """
    left = list(deal(count, shares, least=1))
    total = list(left)
    credit = [0] * len(left)
    order = []
    for _ in range(count):
        credit = [balance + number for balance, number in zip(credit, total, strict=True)]
        chosen = max(range(len(credit)), key=lambda rank: (credit[rank], -rank))
        credit[chosen] -= count
        order.append(chosen)
    return tuple(order)
