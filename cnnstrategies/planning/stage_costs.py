"""What the stages of a layout cost, what passes between them, and what sums of gradients over devices cost."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, NodeCost

Time = Callable[[float], float]
BUCKET_BYTES = 25 * 2**20  # that the pipeline reduces at once, as DistributedDataParallel
FIRST_BUCKET_BYTES = 2**20  # of DistributedDataParallel


@dataclass(frozen=True)
class BucketCost:
    """Gradients that are reduced at once.

    Attributes:
        ready: Seconds from the backward's start until the last of them is there.
    """

    ready: float
    bytes: float


def all_reduce(cluster: Cluster, first: int, count: int) -> Time:
    """Seconds of a ring all-reduce of so many bytes over devices that are numbered one after another."""
    if count < 2:
        return lambda size: 0.0
    ring = cluster.ring(first, count)
    return lambda size: ring.all_reduce_time(size, count)


def buckets(
    gradients: Iterable[tuple[float, int]], size: int = BUCKET_BYTES, first: int | None = None
) -> list[BucketCost]:
    """Gather gradients, as the backward makes them, until there are ``size`` bytes, ``first`` of the first bucket.

    Args:
        gradients: When each is ready, in seconds from the backward's start, and its bytes.
    """
    found: list[BucketCost] = []
    gathered, limit, last = 0, first or size, 0.0
    for ready, count in gradients:
        if not count:
            continue
        gathered, last = gathered + count, ready
        if gathered >= limit:
            found.append(BucketCost(ready, gathered))
            gathered, limit = 0, size
    return [*found, BucketCost(last, gathered)] if gathered else found


def reduced_at(parts: Sequence[BucketCost], backward: float, time: Time) -> float:
    """When the backward and the reductions have ended, in seconds from the backward's start.

    c_k = max(c_{k-1}, r_k) + A(s_k): a bucket is reduced when it is ready and the one before it is done.
    """
    end = 0.0
    for part in parts:
        end = max(end, part.ready) + time(part.bytes)
    return max(end, backward)


@dataclass(frozen=True)
class StageCost:
    """The costs of a stage for one microbatch; times are in seconds.

    Attributes:
        received_bytes: Bytes of its inputs.
        saved_bytes: Bytes that it makes and keeps until the backward.
        gradients: When the gradients of its nodes are ready, in seconds from the backward's start, and their bytes, in
            the order of the backward.
    """

    nodes: int
    forward: float
    backward: float
    parameter_bytes: int
    received_bytes: int
    saved_bytes: int
    gradients: tuple[tuple[float, int], ...] = ()

    def buckets(self, size: int, backward: float, first: int | None = None) -> list[BucketCost]:
        """The gradients as they are reduced.

        Args:
            backward: Seconds that the backward takes on the device, at its speed and with what it recomputes.
        """
        if not self.gradients:
            return []
        late = self.backward - self.gradients[-1][0]  # What is recomputed comes before.
        scale = backward / self.backward if self.backward else 1.0
        return buckets((((late + ready) * scale, count) for ready, count in self.gradients), size, first)

    @property
    def time(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageMessage:
    """What one stage sends another for one microbatch."""

    bytes: int
    gradient_bytes: int


def stage_costs(costs: GraphCosts, cuts: Sequence[int]) -> list[StageCost]:
    """The costs of the stages that the cuts make."""
    received = [costs.input_bytes] + [0] * len(cuts)
    for (_, consumer), message in messages(costs, cuts).items():
        received[consumer] += message.bytes
    stages = []
    for index, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(costs.nodes)), strict=True)):
        nodes = costs.nodes[start:end]
        stages.append(
            StageCost(
                nodes=len(nodes),
                forward=sum(node.forward for node in nodes),
                backward=sum(node.backward for node in nodes),
                parameter_bytes=sum(node.parameter_bytes for node in nodes),
                received_bytes=received[index],
                saved_bytes=sum(node.saved_bytes for node in nodes),
                gradients=_gradients(nodes),
            )
        )
    return stages


def _gradients(nodes: Sequence[NodeCost]) -> tuple[tuple[float, int], ...]:
    """The last node's come first."""
    ready = itertools.accumulate(node.backward for node in reversed(nodes))
    return tuple((time, node.parameter_bytes) for time, node in zip(ready, reversed(nodes), strict=True))


def messages(costs: GraphCosts, cuts: Sequence[int]) -> dict[tuple[int, int], StageMessage]:
    """What passes between the stages, by (sending stage, receiving stage).

    A value goes straight to each stage that uses it, once.
    """
    stage_of = [bisect.bisect_right(cuts, index) for index in range(len(costs.nodes))]
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for value in costs.values:
        source = stage_of[value.producer]
        for target in {stage_of[consumer] for consumer in value.consumers} - {source}:
            size, gradient = sums.get((source, target), (0, 0))
            sums[source, target] = (size + value.bytes, gradient + value.gradient_bytes)
    return {pair: StageMessage(*sizes) for pair, sizes in sorted(sums.items())}


def sent_in_a_step(costs: GraphCosts, layout: Layout, microbatches: int) -> int:
    """Bytes that all devices together send in a step: activations, their gradients, and those of parameters."""
    passing = sum(message.bytes + message.gradient_bytes for message in messages(costs, layout.cuts).values())
    pairs = zip(layout.replicas, stage_costs(costs, layout.cuts), strict=True)
    return passing * microbatches + sum(2 * (count - 1) * stage.parameter_bytes for count, stage in pairs)
