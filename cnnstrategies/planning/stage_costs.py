"""Costs of a layout's stages, of the messages between stages, and of the reduction of gradients over devices."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, NodeCost

Time = Callable[[float], float]  # Returns the seconds of an operation on a number of bytes.
BUCKET_BYTES = 25 * 2**20  # Gradients that the pipeline reduces at once, as DistributedDataParallel does.
FIRST_BUCKET_BYTES = 2**20  # The first bucket of DistributedDataParallel.


@dataclass(frozen=True)
class BucketCost:
    """A bucket of gradients that are reduced at once.

    Attributes:
        ready: Seconds from the backward's start until the last gradient of the bucket is ready.
        bytes: Size of the gradients.
    """

    ready: float
    bytes: float


def all_reduce(cluster: Cluster, first: int, count: int) -> Time:
    """Return a function that gives the seconds of a ring all-reduce over ``count`` consecutive devices."""
    if count < 2:
        return lambda size: 0.0
    ring = cluster.ring(first, count)
    return lambda size: ring.all_reduce_time(size, count)


def buckets(
    gradients: Iterable[tuple[float, int]], size: int = BUCKET_BYTES, first: int | None = None
) -> list[BucketCost]:
    """Return the buckets into which gradients are gathered as the backward makes them.

    Args:
        gradients: Each gradient's time in seconds from the backward's start, and its bytes, in order of time.
        size: Bytes at which a bucket is complete.
        first: Bytes at which the first bucket is complete; None for `size`.
    """
    complete: list[BucketCost] = []
    gathered, limit, last = 0, first or size, 0.0
    for ready, count in gradients:
        if not count:
            continue
        gathered, last = gathered + count, ready
        if gathered >= limit:
            complete.append(BucketCost(ready, gathered))
            gathered, limit = 0, size
    return [*complete, BucketCost(last, gathered)] if gathered else complete


def reduced_at(parts: Sequence[BucketCost], backward: float, time: Time) -> float:
    """Return the time at which the backward and the reductions have ended, in seconds from the backward's start.

    A bucket is reduced when it is ready and the bucket before it is done: c_k = max(c_{k-1}, r_k) + A(s_k).

    Args:
        parts: Buckets in the order of the backward.
        backward: Seconds of the backward.
        time: Returns the seconds of the reduction of a number of bytes.
    """
    end = 0.0
    for part in parts:
        end = max(end, part.ready) + time(part.bytes)
    return max(end, backward)


@dataclass(frozen=True)
class StageCost:
    """The costs of a stage for one microbatch; times are in seconds.

    Attributes:
        nodes: Number of the stage's nodes.
        received_bytes: Bytes of the stage's inputs.
        saved_bytes: Bytes that the stage makes and keeps until the backward.
        gradients: Time at which the gradients of each node are ready, from the backward's start, and their bytes, in
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
        """Return the buckets in which the stage's gradients are reduced.

        Args:
            size: Bytes of a bucket.
            backward: Seconds that the backward takes on the device, at the device's speed and including recomputation.
            first: Bytes of the first bucket; None for `size`.
        """
        if not self.gradients:
            return []
        late = self.backward - self.gradients[-1][0]  # Recomputation precedes the backward of the nodes.
        scale = backward / self.backward if self.backward else 1.0
        return buckets((((late + ready) * scale, count) for ready, count in self.gradients), size, first)

    @property
    def time(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageMessage:
    """Values and gradients that pass between two stages for one microbatch.

    Attributes:
        bytes: Size of the values that the first stage sends to the second.
        gradient_bytes: Size of the gradients that the second stage sends back.
    """

    bytes: int
    gradient_bytes: int


def stage_costs(costs: GraphCosts, cuts: Sequence[int]) -> list[StageCost]:
    """Return the costs of the stages into which the cuts divide a network."""
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
    """Return the time and the bytes of each node's gradients, the last node first."""
    ready = itertools.accumulate(node.backward for node in reversed(nodes))
    return tuple((time, node.parameter_bytes) for time, node in zip(ready, reversed(nodes), strict=True))


def messages(costs: GraphCosts, cuts: Sequence[int]) -> dict[tuple[int, int], StageMessage]:
    """Return the messages between stages, by sending and receiving stage.

    A value goes directly from the stage that makes it to each stage that uses it, once.
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
    """Return the bytes that all devices together send in a step.

    The bytes are those of activations, of the activations' gradients, and of the parameters' gradients.
    """
    passing = sum(message.bytes + message.gradient_bytes for message in messages(costs, layout.cuts).values())
    pairs = zip(layout.replicas, stage_costs(costs, layout.cuts), strict=True)
    return passing * microbatches + sum(2 * (count - 1) * stage.parameter_bytes for count, stage in pairs)
