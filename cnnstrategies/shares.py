"""How samples and microbatches are dealt to ranks: by shares, which are equal unless somebody says otherwise.

Samplers, the replicas of a pipeline, evaluation, planner and simulator all ask here.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from cnnstrategies.errors import ConfigurationError

GAIN = 0.03  # that is predicted, for which it is dealt anew
NORMALISED_TOGETHER = 8  # Images of which mean and variance are still worth something.


def check_shares(shares: str | Sequence[float], named: Sequence[str]) -> None:
    """Refuse what is neither a share above 0 for each rank nor one of some words, by a ConfigurationError."""
    if isinstance(shares, str):
        if shares not in named:
            raise ConfigurationError(f"shares={shares!r}: accepted are {', '.join(named)} and a list such as [3, 1]")
    elif not shares or not all(0 < share < inf for share in shares):
        raise ConfigurationError(f"shares={list(shares)}: each rank needs a share above 0")


def check_initial(initial: str | Sequence[float], shares: str | Sequence[float]) -> None:
    """Refuse what ``shares: auto`` cannot begin with, or where they are not to be found, by a ConfigurationError."""
    check_shares(shares, ("auto", "equal"))
    check_shares(initial, ("equal",))
    if initial != "equal" and shares != "auto":
        raise ConfigurationError(f"initial_shares={initial} is what shares: auto begins with, not shares: {shares}")


def deal(samples: int, shares: Sequence[float], least: int = 0, most: float | Sequence[float] = inf) -> tuple[int, ...]:
    """How many samples each rank gets: whole numbers whose sum is ``samples``, nearest to the shares.

    By largest remainders; of equal ones those of lower ranks get the sample more.

    Args:
        shares: What each rank is to have in proportion to the others'; above 0.
        least: Samples of each rank, as far as there are enough for all.
        most: Samples that a rank can hold; one number for all, or whole ones for each.

    Raises:
        ConfigurationError: There are more samples than all ranks can hold.
    """
    ranks = len(shares)
    least = min(least, samples // ranks)
    mosts = most if isinstance(most, Sequence) else [most] * ranks
    if sum(mosts) < samples:
        raise ConfigurationError(
            f"{samples} samples for {ranks} processes, each of which holds {most} at most: {sum(mosts)} at most"
        )
    ideal = [samples * share / sum(shares) for share in shares]
    fixed: dict[int, int] = {}
    while True:
        # Those below the least get that, or those above the most: whichever are farther off. The others share the rest.
        bound = {rank: max(least, min(ideal[rank], mosts[rank])) for rank in range(ranks) if rank not in fixed}
        off = {rank: number - ideal[rank] for rank, number in bound.items()}
        sign = 1 if sum(off.values()) >= 0 else -1
        found = [rank for rank, difference in off.items() if difference * sign > 0]
        if not found:
            break
        fixed |= {rank: round(bound[rank]) for rank in found}
        free = [rank for rank in range(ranks) if rank not in fixed]
        left, whole = samples - sum(fixed.values()), sum(shares[rank] for rank in free)
        for rank in free:
            ideal[rank] = left * shares[rank] / whole
    return tuple(_rounded(samples, [fixed.get(rank, number) for rank, number in enumerate(ideal)]))


def check_count(shares: str | Sequence[float], ranks: int) -> None:
    """Refuse a list of shares that is not one for each rank, by a ConfigurationError."""
    if not isinstance(shares, str) and len(shares) != ranks:
        raise ConfigurationError(
            f"shares={list(shares)} are {len(shares)}, and there are {ranks} processes "
            "(trainer.devices x trainer.num_nodes): give each one, or leave shares out"
        )


@dataclass(frozen=True)
class Proposal:
    """Shares that make a step quicker, and how much: the step's time before by that after, less 1."""

    shares: tuple[float, ...]
    gain: float


def proposal(
    now: Sequence[int], seconds: Sequence[float], step: float, least: int = 0, most: float | Sequence[float] = inf
) -> Proposal | None:
    """Other shares, for training and for the planner; None where they would not gain enough.

    Every rank has its share when the slowest one has: then all wait for nobody. What a step takes beyond its slowest
    rank's own time, as to reduce gradients, it takes whatever the shares (LB-BSP, Chen et al., SoCC 2020). A rank's
    time for a sample is that of its present share; where it is not proportional to that, the next proposal is nearer.

    Args:
        now: Samples of each rank.
        seconds: Of each rank for a sample.
        step: Seconds of a step now.
        least: As of :func:`deal`, with ``most``.
    """
    speeds = tuple(1 / one for one in seconds)
    then = deal(sum(now), speeds, least, most)
    before, after = (max(n * one for n, one in zip(counts, seconds, strict=True)) for counts in (now, then))
    return worth(then, before, after, step)


def worth(shares: Sequence[float], before: float, after: float, step: float) -> Proposal | None:
    """Shares by which the predicted part of a step takes ``after`` in place of ``before``, if they gain enough."""
    rest = max(0.0, step - before)
    gain = (before + rest) / (after + rest) - 1
    return Proposal(tuple(shares), gain) if gain > GAIN else None


@lru_cache(maxsize=4096)
def soonest(count: int, speeds: tuple[float, ...], most: tuple[int, ...] = ()) -> tuple[int, ...]:
    """How many of so many microbatches each replica runs, so that the last one is done soonest; none has nothing.

    Args:
        most: Of each replica, for all together at least so many.
    """
    counts = [min(1, count // len(speeds))] * len(speeds)
    queue = [((own + 1) / speed, replica) for replica, (own, speed) in enumerate(zip(counts, speeds, strict=True))]
    heapq.heapify(queue)
    for _ in range(count - sum(counts)):
        while most and counts[queue[0][1]] >= most[queue[0][1]]:
            heapq.heappop(queue)
        replica = queue[0][1]
        counts[replica] += 1
        heapq.heapreplace(queue, ((counts[replica] + 1) / speeds[replica], replica))
    return tuple(counts)


@lru_cache(maxsize=64)  # Each step asks for the same ones several times.
def _dealt(samples: int, shares: tuple[float, ...], least: int, most: float) -> tuple[int, ...]:
    return deal(samples, shares, least, most)


class Deals:
    """By which shares the batches of training are dealt, as it goes on: all ranks have the same ones.

    Args:
        shares: From the first batch on; equal ones for so many ranks.
        least: Samples of each rank in a batch, as far as there are enough for all.
        most: Samples that a rank can hold.
        loads: By which shares those ranks load that do, of the shares of all ranks; by default all by their own.
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
        """Those that were dealt last."""
        return self._since[-1][1]

    @property
    def since(self) -> tuple[int, int]:
        """From which epoch and batch on."""
        return self._since[-1][0]

    def change(self, epoch: int, batch: int, shares: Sequence[float]) -> None:
        """Deal anew from a batch on, which no rank has drawn yet."""
        assert self.since < (epoch, batch), "one change after the other"
        now = [(since, old) for since, old in self._since if since[0] == epoch]
        self._since = [*(now or self._since[-1:]), ((epoch, batch), tuple(shares))]

    def at(self, epoch: int, batch: int) -> tuple[float, ...]:
        """The shares of a batch."""
        return next((given for since, given in reversed(self._since) if since <= (epoch, batch)), self._since[0][1])

    def counts(self, epoch: int, batch: int, samples: int) -> tuple[int, ...]:
        """Samples of each rank that loads in a batch of so many."""
        return _dealt(samples, tuple(self.loads(self.at(epoch, batch))), self.least, self.most)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"since": [[epoch, batch, *shares] for (epoch, batch), shares in self._since]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as before, if there are as many ranks; else with the shares that this run begins with."""
        since = [((int(epoch), int(batch)), tuple(shares)) for epoch, batch, *shares in state["since"]]
        if len(since[-1][1]) == len(self.shares):
            self._since = since


def _rounded(total: int, ideal: Sequence[float]) -> list[int]:
    counts = [int(one) for one in ideal]
    by_rest = sorted(range(len(ideal)), key=lambda index: (counts[index] - ideal[index], index))
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


def turns(counts: Sequence[int]) -> list[list[int]]:
    """Which places of a global batch each rank gets that has so many of them.

    The ranks take turns, as long as each has not all of its own: with equal counts rank r of R has r, r + R and so on.
    """
    places: list[list[int]] = [[] for _ in counts]
    place = 0
    for turn in range(max(counts, default=0)):
        for rank, count in enumerate(counts):
            if turn < count:
                places[rank].append(place)
                place += 1
    return places


@lru_cache(maxsize=256)  # A planner asks for the same ones again and again.
def rotation(shares: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Who gets each of so many microbatches, one after another.

    Smooth weighted round-robin: in any stretch each has nearly its share, and never all of it at once. With equal
    shares microbatch m goes to ``m mod R``. Each has one where there are as many.
    """
    left = list(deal(count, shares, least=1))
    total = list(left)
    credit = [0] * len(left)
    order = []
    for _ in range(count):
        credit = [have + gets for have, gets in zip(credit, total, strict=True)]
        chosen = max(range(len(credit)), key=lambda rank: (credit[rank], -rank))
        credit[chosen] -= count
        order.append(chosen)
    return tuple(order)
