"""Division of samples and microbatches among ranks by shares, which are equal by default.

Samplers, pipelines, evaluation, the planner and the simulator use these functions.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from cnnstrategies.errors import ConfigurationError

GAIN = 0.03  # Smallest relative gain in speed for which shares are changed.
NORMALISED_TOGETHER = 8  # Smallest number of images for which batch normalisation gets a useful mean and variance.


def check_shares(shares: str | Sequence[float], named: Sequence[str]) -> None:
    """Check the option ``shares``.

    Args:
        shares: Value of the option: a keyword, or a list with the share of each rank.
        named: Keywords that the option accepts.

    Raises:
        ConfigurationError: The value is neither one of the keywords nor a list of numbers above 0.
    """
    if isinstance(shares, str):
        if shares not in named:
            raise ConfigurationError(f"shares={shares!r}: use {', '.join(named)} or a list such as [3, 1]")
    elif not shares or not all(0 < share < inf for share in shares):
        raise ConfigurationError(f"shares={list(shares)}: set a share above 0 for each rank")


def check_initial(initial: str | Sequence[float], shares: str | Sequence[float]) -> None:
    """Check the option ``initial_shares``.

    Raises:
        ConfigurationError: The initial shares are not valid, or have no effect because ``shares`` is not ``auto``.
    """
    check_shares(shares, ("auto", "equal"))
    check_shares(initial, ("equal",))
    if initial != "equal" and shares != "auto":
        raise ConfigurationError(
            f"initial_shares={initial} has no effect with shares={shares}: set shares: auto, or leave initial_shares "
            "out"
        )


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


def check_count(shares: str | Sequence[float], ranks: int, name: str = "shares") -> None:
    """Check that a list has one number for each rank.

    Args:
        shares: The list, or a keyword, which is accepted.
        ranks: Number of ranks.
        name: Name of the option with the list.

    Raises:
        ConfigurationError: The length of the list is not the number of ranks.
    """
    if not isinstance(shares, str) and len(shares) != ranks:
        raise ConfigurationError(
            f"{name}={list(shares)} has length {len(shares)}, but there are {ranks} processes "
            f"(trainer.devices x trainer.num_nodes): give one number for each process, or leave {name} out"
        )


@dataclass(frozen=True)
class Proposal:
    """Proposed new shares.

    Attributes:
        shares: Share of each rank.
        gain: Relative gain in speed: the step time with the old shares divided by the step time with the new shares,
            minus 1.
    """

    shares: tuple[float, ...]
    gain: float


def proposal(
    now: Sequence[int], seconds: Sequence[float], step: float, least: int = 0, most: float | Sequence[float] = inf
) -> Proposal | None:
    """Propose shares with which a step is faster. Return None if the gain would not be larger than `GAIN`.

    Both training and the planner use this function. With the best shares, all ranks finish their computation at the
    same time. Other work in a step, such as reducing gradients, does not depend on the shares (LB-BSP, Chen et al.,
    SoCC 2020). The prediction assumes that a rank's time is proportional to its number of samples. If this assumption
    is not exact, the next proposal corrects the error with new measurements.

    Args:
        now: Current number of samples of each rank.
        seconds: Time per sample of each rank, in seconds, measured with the current shares.
        step: Current time of a step, in seconds.
        least: Smallest number of samples of a rank; see :func:`deal`.
        most: Largest number of samples of a rank; see :func:`deal`.
    """
    speeds = tuple(1 / duration for duration in seconds)
    then = deal(sum(now), speeds, least, most)
    before, after = (
        max(count * duration for count, duration in zip(counts, seconds, strict=True)) for counts in (now, then)
    )
    return worth(then, before, after, step)


def worth(shares: Sequence[float], before: float, after: float, step: float) -> Proposal | None:
    """Return new shares with their gain. Return None if the gain is not larger than `GAIN`.

    Args:
        shares: The new shares.
        before: Predicted computation time of the slowest rank with the old shares, in seconds.
        after: Predicted computation time of the slowest rank with the new shares, in seconds.
        step: Measured time of a whole step with the old shares, in seconds.
    """
    rest = max(0.0, step - before)
    gain = (before + rest) / (after + rest) - 1
    return Proposal(tuple(shares), gain) if gain > GAIN else None


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


@lru_cache(maxsize=64)  # Several calls in each step have the same arguments.
def _dealt(samples: int, shares: tuple[float, ...], least: int, most: float | tuple[float, ...]) -> tuple[int, ...]:
    return deal(samples, shares, least, most)


class Deals:
    """History of the ranks' shares during a run. It determines how each batch is divided among the ranks.

    Shares may change during training. All ranks must make the same changes.

    Args:
        shares: Share of each rank, from the first batch on.
        least: Smallest number of samples of a rank in a batch, if there are enough samples for all ranks.
        most: Largest number of samples of a rank in a batch: one number for all ranks, or a number for each rank.
        loads: Function that takes the shares of all ranks and returns the shares of the ranks that load samples. By
            default all ranks load samples.
    """

    def __init__(
        self,
        shares: Sequence[float],
        least: int = 0,
        most: float | tuple[float, ...] = inf,
        loads: Callable[[Sequence[float]], Sequence[float]] = tuple,
    ) -> None:
        self.least, self.most, self.loads = least, most, loads
        self._since = [((0, 0), tuple(shares))]

    @property
    def shares(self) -> tuple[float, ...]:
        """The current share of each rank."""
        return self._since[-1][1]

    @property
    def since(self) -> tuple[int, int]:
        """Epoch and batch from which the current shares are used."""
        return self._since[-1][0]

    def change(self, epoch: int, batch: int, shares: Sequence[float]) -> None:
        """Use new shares from batch ``batch`` of epoch ``epoch`` on. No rank may have drawn this batch yet."""
        assert self.since < (epoch, batch), "changes must be made in order"
        now = [(since, old) for since, old in self._since if since[0] == epoch]
        self._since = [*(now or self._since[-1:]), ((epoch, batch), tuple(shares))]

    def at(self, epoch: int, batch: int) -> tuple[float, ...]:
        """Return the shares with which a batch is divided."""
        return next((shares for since, shares in reversed(self._since) if since <= (epoch, batch)), self._since[0][1])

    def counts(self, epoch: int, batch: int, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each rank that loads samples.

        Args:
            epoch: Epoch of the batch.
            batch: Index of the batch in its epoch.
            samples: Number of samples in the batch over all ranks.
        """
        return _dealt(samples, tuple(self.loads(self.at(epoch, batch))), self.least, self.most)

    def state_dict(self) -> dict[str, Any]:
        """Return the history of the shares, for a checkpoint.

        Each entry has the shares of all ranks, and the epoch and the batch from which these shares are used.
        """
        return {"since": [[epoch, batch, *shares] for (epoch, batch), shares in self._since]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shares of a checkpoint. If the number of ranks has changed, keep this run's initial shares."""
        since = [((int(epoch), int(batch)), tuple(shares)) for epoch, batch, *shares in state["since"]]
        if len(since[-1][1]) == len(self.shares):
            self._since = since


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
