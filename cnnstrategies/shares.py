"""Division of samples and microbatches among ranks by shares, which are equal by default.

Samplers, the replicas of a pipeline, evaluation, planner and simulator all use these functions.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from cnnstrategies.errors import ConfigurationError

GAIN = 0.03  # Shares change if the predicted step is faster by more than this fraction.
NORMALISED_TOGETHER = 8  # Batch normalisation needs at least this many images for a useful mean and variance.


def check_shares(shares: str | Sequence[float], named: Sequence[str]) -> None:
    """Raise a ConfigurationError unless shares are one of the words `named` or a list of numbers above 0."""
    if isinstance(shares, str):
        if shares not in named:
            raise ConfigurationError(f"shares={shares!r}: use {', '.join(named)} or a list such as [3, 1]")
    elif not shares or not all(0 < share < inf for share in shares):
        raise ConfigurationError(f"shares={list(shares)}: each rank needs a share above 0")


def check_initial(initial: str | Sequence[float], shares: str | Sequence[float]) -> None:
    """Raise a ConfigurationError if initial shares are not valid, or if ``shares`` is not auto and ignores them."""
    check_shares(shares, ("auto", "equal"))
    check_shares(initial, ("equal",))
    if initial != "equal" and shares != "auto":
        raise ConfigurationError(
            f"initial_shares={initial} is for shares: auto, and shares is {shares}: set shares: auto, or leave "
            "initial_shares out"
        )


def deal(samples: int, shares: Sequence[float], least: int = 0, most: float | Sequence[float] = inf) -> tuple[int, ...]:
    """Return the number of samples of each rank, in proportion to the shares. The numbers sum up to ``samples``.

    Rounding is by the largest remainder. Of ranks with equal remainders, lower ranks get one more sample.

    Args:
        samples: Number of samples to divide.
        shares: Relative share of each rank, above 0.
        least: Least number of samples of a rank, if there are enough samples for all ranks.
        most: Largest number of samples that a rank can hold: one number for all ranks, or a whole number for each.

    Raises:
        ConfigurationError: There are more samples than all ranks can hold.
    """
    ranks = len(shares)
    least = min(least, samples // ranks)
    mosts = most if isinstance(most, Sequence) else [most] * ranks
    if sum(mosts) < samples:
        raise ConfigurationError(
            f"{samples} samples for {ranks} processes, each of which holds {most} at most: use at most {sum(mosts)}"
        )
    ideal = [samples * share / sum(shares) for share in shares]
    fixed: dict[int, int] = {}
    while True:
        # In each round, either all ranks below `least` are raised to it, or all ranks above `most` are lowered to it,
        # depending on the larger sum of differences. The loop then divides the rest among the other ranks.
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


def check_count(shares: str | Sequence[float], ranks: int) -> None:
    """Raise a ConfigurationError if the length of a list of shares is not the number of ranks."""
    if not isinstance(shares, str) and len(shares) != ranks:
        raise ConfigurationError(
            f"shares={list(shares)} has length {len(shares)}, but there are {ranks} processes "
            "(trainer.devices x trainer.num_nodes): give one number for each process, or leave shares out"
        )


@dataclass(frozen=True)
class Proposal:
    """Shares that make a step faster.

    Attributes:
        shares: Share of each rank.
        gain: Time of a step with the old shares divided by that with the new shares, minus 1.
    """

    shares: tuple[float, ...]
    gain: float


def proposal(
    now: Sequence[int], seconds: Sequence[float], step: float, least: int = 0, most: float | Sequence[float] = inf
) -> Proposal | None:
    """Return better shares, for training and for the planner; None if the gain would be below `GAIN`.

    The best shares make all ranks finish at the same time. The rest of a step, such as reducing gradients, does not
    depend on the shares (LB-BSP, Chen et al., SoCC 2020). The time per sample was measured with the current shares. If
    a rank's time is not proportional to its number of samples, the next proposal corrects the error.

    Args:
        now: Current number of samples of each rank.
        seconds: Time per sample of each rank, in seconds.
        step: Current time of a step, in seconds.
        least: Least number of samples of a rank; see :func:`deal`.
        most: Largest number of samples of a rank; see :func:`deal`.
    """
    speeds = tuple(1 / duration for duration in seconds)
    then = deal(sum(now), speeds, least, most)
    before, after = (
        max(count * duration for count, duration in zip(counts, seconds, strict=True)) for counts in (now, then)
    )
    return worth(then, before, after, step)


def worth(shares: Sequence[float], before: float, after: float, step: float) -> Proposal | None:
    """Return shares with their gain if the gain is above `GAIN`, else None.

    Args:
        shares: The new shares.
        before: Predicted time of the slowest rank's own work with the old shares, in seconds.
        after: Predicted time of the slowest rank's own work with the new shares, in seconds.
        step: Measured time of a whole step with the old shares, in seconds.
    """
    rest = max(0.0, step - before)
    gain = (before + rest) / (after + rest) - 1
    return Proposal(tuple(shares), gain) if gain > GAIN else None


@lru_cache(maxsize=4096)
def soonest(count: int, speeds: tuple[float, ...], most: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Divide microbatches among replicas so that the last microbatch ends as early as possible.

    Each replica has at least one microbatch if there are enough.

    Args:
        count: Number of microbatches.
        speeds: Speed of each replica.
        most: Largest number of microbatches of each replica. The sum must be at least `count`. Empty for no limits.

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


@lru_cache(maxsize=64)  # Each step needs the same numbers several times.
def _dealt(samples: int, shares: tuple[float, ...], least: int, most: float) -> tuple[int, ...]:
    return deal(samples, shares, least, most)


class Deals:
    """Division of the batches of a training among the ranks by shares, as cards are dealt to players.

    The shares may change during training. All ranks must make the same changes.

    Args:
        shares: Share of each rank, from the first batch on.
        least: Least number of samples of a rank in a batch, if there are enough samples for all ranks.
        most: Largest number of samples that a rank can hold.
        loads: Returns the shares of the ranks that load samples, from the shares of all ranks. By default all ranks
            load.
    """

    def __init__(
        self,
        shares: Sequence[float],
        least: int = 0,
        most: float = inf,
        loads: Callable[[Sequence[float]], Sequence[float]] = tuple,
    ) -> None:
        self.least, self.most, self.loads = least, most, loads
        self._since = [((0, 0), tuple(shares))]

    @property
    def shares(self) -> tuple[float, ...]:
        """The latest shares."""
        return self._since[-1][1]

    @property
    def since(self) -> tuple[int, int]:
        """Epoch and batch from which the latest shares are used."""
        return self._since[-1][0]

    def change(self, epoch: int, batch: int, shares: Sequence[float]) -> None:
        """Use new shares, beginning with a batch that no rank has drawn yet."""
        assert self.since < (epoch, batch), "changes must be made in order"
        now = [(since, old) for since, old in self._since if since[0] == epoch]
        self._since = [*(now or self._since[-1:]), ((epoch, batch), tuple(shares))]

    def at(self, epoch: int, batch: int) -> tuple[float, ...]:
        """Return the shares of a batch."""
        return next((shares for since, shares in reversed(self._since) if since <= (epoch, batch)), self._since[0][1])

    def counts(self, epoch: int, batch: int, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each rank that loads, in a batch of `samples` samples."""
        return _dealt(samples, tuple(self.loads(self.at(epoch, batch))), self.least, self.most)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and their first batches, for a checkpoint."""
        return {"since": [[epoch, batch, *shares] for (epoch, batch), shares in self._since]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shares of a checkpoint. With another number of ranks keep this run's initial shares."""
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

    The ranks take turns until each rank has as many positions as samples. With equal counts, rank r of R has the
    positions r, r + R, r + 2 R and so on.

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


@lru_cache(maxsize=256)  # A planner needs the same rotations many times.
def rotation(shares: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Return the rank of each of `count` microbatches, in order.

    The method is smooth weighted round-robin: in every stretch each rank has nearly its share, and never all of its
    share at once. With equal shares microbatch m goes to rank ``m mod R``. Each rank has at least one microbatch if
    there are enough.
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
