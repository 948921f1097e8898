"""Timelines of measured steps, and predictions of the time that the same steps would take after a change.

A timeline consists of segments. In a segment, each rank does its own work, and then all ranks meet in a collective. A
rank that arrives early waits there, so a step takes as long as the slowest rank of each segment, and not as long as the
slowest rank on average. :func:`predict` computes this time again after a change: with less work on a rank, without a
collective, or with a faster collective.

A broadcast is a collective in which all ranks meet, because gloo's sender also waits until the others receive.
"""

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

# Kinds of collectives.
GRADIENTS = "gradients"  # DDP's all-reduce of the gradients.
BUFFERS = "buffers"  # DDP's broadcast of the buffers.
LOG = "log"  # The collectives of `self.log(..., sync_dist=True)`.
BARRIER = "barrier"  # A barrier in the user's code.
EXCHANGE = "exchange"  # Any other collective in the user's code.
ROWS = "rows"  # Rows of divided images that another rank of a group has.
SUMS = "sums"  # Sums over the ranks of a group that have parts of the same images.
BATCH = "batch"  # A batch from the rank that loads for a group.
INTERNAL = "internal"  # Other collectives of Lightning and of this package.
OTHERS = "others"  # Whatever the ranks wait for, if the ranks do not run the same collectives.
WAITING = "waiting: "  # Prefix of the part of a step in which a rank is in a collective. The kind follows.


@dataclass(frozen=True)
class Segment:
    """A rank's work up to a collective, and the collective.

    Attributes:
        work: Seconds of the rank's own work since the previous collective. Keys are the names of a step's parts.
        collective: Kind of the collective that follows; empty at the end of a timeline.
        waited: Seconds that the rank spends in the collective.
        place: Line of the user's code that runs the collective, as ``file:line``; empty if not known.
    """

    work: Mapping[str, float]
    collective: str = ""
    waited: float = 0.0
    place: str = ""


@dataclass(frozen=True)
class Round:
    """The timelines of the steps of one round.

    Attributes:
        steps: Number of steps.
        ranks: The timeline of each rank. The segments with the same index end with the same collective.
    """

    steps: int
    ranks: Sequence[Sequence[Segment]]

    @functools.cached_property
    def seconds(self) -> float:
        """Seconds that the steps take without a change."""
        return predict(self.ranks, Change())


@dataclass(frozen=True)
class Change:
    """A change of the training, whose effect is predicted.

    Attributes:
        work: Factors of a rank's own work. Keys are a rank and the name of a part.
        costs: Factors of the time that collectives take after all ranks have arrived. Keys are kinds of collectives.
        without: Kinds of the collectives that are left out.
    """

    work: Mapping[tuple[int, str], float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    without: Collection[str] = ()


def predict(ranks: Sequence[Sequence[Segment]], change: Change) -> float:
    """Return the seconds that the steps of a round take after a change.

    Args:
        ranks: The timeline of each rank.
        change: The change.
    """
    clocks = [0.0] * len(ranks)
    for segments in zip(*ranks, strict=True):
        for rank, segment in enumerate(segments):
            clocks[rank] += sum(change.work.get((rank, part), 1.0) * taken for part, taken in segment.work.items())
        kind = segments[0].collective
        if kind and kind not in change.without:
            # The rank that arrives last waits only for the collective itself.
            cost = min(segment.waited for segment in segments) * change.costs.get(kind, 1.0)
            clocks = [max(clocks) + cost] * len(clocks)
    return max(clocks)


def saved_fractions(rounds: Sequence[Round], change: Change) -> list[float]:
    """Return the fraction of each round's time that a change saves."""
    return [1 - predict(each.ranks, change) / max(each.seconds, 1e-9) for each in rounds]


def joined(steps: int, timelines: Sequence[Sequence[Segment]], parts: Sequence[Mapping[str, float]]) -> Round:
    """Return the round that consists of the ranks' timelines.

    The ranks begin to measure at different moments, because nothing makes them wait for each other between two steps.
    The timelines of the round therefore begin after the first collective, and the work before the first collective is
    moved to the end, where it takes the place of the work that follows the last measured step.

    If the ranks run different collectives, as the stages of a pipeline do, each rank gets a timeline with a single
    segment: its own work, and then the time for which the rank waits for others.

    Args:
        steps: Number of steps of the round.
        timelines: The timeline of each rank.
        parts: For each rank, the seconds of each part of a step.
    """
    kinds = [[segment.collective for segment in timeline] for timeline in timelines]
    if all(kinds[0] == each for each in kinds):
        return Round(steps, [_from_first_collective(timeline) for timeline in timelines])
    return Round(steps, [_single(steps, of_rank) for of_rank in parts])


def _from_first_collective(timeline: Sequence[Segment]) -> Sequence[Segment]:
    first, *others = timeline
    if not others:
        return timeline
    work = Counter(others[-1].work)
    work.update(first.work)
    return [*others[:-1], replace(first, work=work)]


def _single(steps: int, parts: Mapping[str, float]) -> Sequence[Segment]:
    work = {name: steps * seconds for name, seconds in parts.items() if not name.startswith(WAITING)}
    return [Segment(work, OTHERS, steps * sum(parts.values()) - sum(work.values()))]
