"""Choose the segments of a network whose activations are computed again in the backward, so that few bytes are kept."""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.memory import OptimizerMemory, PeakMemory, segments_peak

# Number of limits on the activations of a segment that are tried. They are spaced evenly on a logarithmic scale, so the
# result is at most a few percent larger than the best one.
LIMITS = 24
# Key in a candidate's options: activations are computed again, by the callback ActivationCheckpointing.
RECOMPUTED = "activation_checkpointing"
CALLBACK = "cnnstrategies.callbacks.ActivationCheckpointing"


@dataclass(frozen=True)
class Segments:
    """A division of a network into segments, all of which except the last run their forward again in the backward.

    Attributes:
        cuts: Index of the first node of each segment except the first, ascending.
        kept_bytes: Bytes of the inputs, and of the values that pass from one segment to another.
        largest_bytes: Bytes of the activations of the largest segment, which exist during its backward only.
        again: Seconds in which the forwards run again.
    """

    cuts: tuple[int, ...]
    kept_bytes: int
    largest_bytes: int
    again: float

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes of activations at any time."""
        return self.kept_bytes + self.largest_bytes


@lru_cache(maxsize=64)
def choose_segments(costs: GraphCosts) -> Segments:
    """Return the segments that need the fewest bytes of activations.

    For a limit on the bytes of one segment, dynamic programming finds the cuts that keep the fewest bytes between the
    segments. A value counts once, in the segment that makes it, however many later segments use it.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4.
    """
    positions = [0, *costs.cut_positions, len(costs.nodes)]
    saved = [0, *accumulate(node.saved_bytes for node in costs.nodes)]
    parts = [saved[end] - saved[start] for start, end in pairwise(positions)]
    passing = _passing_bytes(costs, positions)
    least, most = max(1, *parts), max(1, saved[-1])
    best: Segments | None = None
    for step in range(LIMITS + 1):
        limit = least * (most / least) ** (step / LIMITS) * (1 + 1e-9)
        segments = segments_of(costs, _fewest_bytes(positions, saved, passing, limit))
        if best is None or (segments.peak_bytes, segments.again) < (best.peak_bytes, best.again):
            best = segments
    assert best is not None
    return best


def segments_of(costs: GraphCosts, cuts: tuple[int, ...]) -> Segments:
    """Return the segments with the given cuts."""
    bounds = list(pairwise((0, *cuts, len(costs.nodes))))
    segment_of = [number for number, (start, end) in enumerate(bounds) for _ in range(start, end)]
    passing = sum(
        value.bytes for value in costs.values if segment_of[max(value.consumers)] > segment_of[value.producer]
    )
    largest = max(sum(node.saved_bytes for node in costs.nodes[start:end]) for start, end in bounds)
    again = sum(node.forward for node in costs.nodes[: bounds[-1][0]])
    return Segments(cuts, costs.input_bytes + passing, largest, again)


def recomputed_peak(
    costs: GraphCosts,
    state: OptimizerMemory,
    batches: int = 1,
    buckets: float = 0.0,
    cuts: tuple[int, ...] | None = None,
) -> PeakMemory:
    """Return the peak of a device that computes activations again.

    The arguments are those of `replica_peak`, and the segments' ``cuts``; by default those of :func:`choose_segments`.
    """
    segments = choose_segments(costs) if cuts is None else segments_of(costs, cuts)
    return segments_peak(costs, segments.cuts, segments.kept_bytes - costs.input_bytes, state, batches, buckets)


def _passing_bytes(costs: GraphCosts, positions: list[int]) -> list[list[int]]:
    """Return, for each end and each start of a segment, the bytes of the values that the segment makes for later ones.

    Args:
        costs: Costs of the network.
        positions: Indices of the nodes at which a segment can start or end.

    Returns:
        A list for each end. Its element i belongs to the segment that starts i + 1 positions before the end.
    """
    made: dict[int, list[tuple[int, int]]] = defaultdict(list)  # By producer: last consumer and bytes of its values.
    for value in costs.values:
        made[value.producer].append((max(value.consumers), value.bytes))
    of_parts = [
        [entry for node in range(start, end) for entry in made.get(node, ())] for start, end in pairwise(positions)
    ]
    return [
        [*accumulate(sum(size for last, size in part if last >= end) for part in reversed(of_parts[:place]))]
        for place, end in enumerate(positions)
    ]


def _fewest_bytes(positions: list[int], saved: list[int], passing: list[list[int]], limit: float) -> tuple[int, ...]:
    """Return the cuts with the fewest bytes between segments, if no segment has more activations than a limit."""
    fewest, previous = [0.0] + [inf] * (len(positions) - 1), [0] * len(positions)
    for end in range(1, len(positions)):
        for distance, size in enumerate(passing[end], start=1):
            start = end - distance
            if saved[positions[end]] - saved[positions[start]] > limit:
                break
            if fewest[start] + size < fewest[end]:
                fewest[end], previous[end] = fewest[start] + size, start
    cuts: list[int] = []
    place = previous[-1]
    while place:
        cuts.append(positions[place])
        place = previous[place]
    return tuple(reversed(cuts))
