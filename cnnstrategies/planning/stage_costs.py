"""Costs of a layout: of its stages, of the messages between stages, and of the reduction of gradients."""

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, NodeCost

Time = Callable[[float], float]  # A function from a number of bytes to the seconds that an operation takes.
BUCKET_BYTES = 25 * 2**20  # Size in bytes of a gradient bucket, in the pipeline and in DistributedDataParallel.
FIRST_BUCKET_BYTES = 2**20  # Size in bytes of the first gradient bucket of DistributedDataParallel.


@dataclass(frozen=True)
class BucketCost:
    """A bucket of gradients, which are reduced together.

    Attributes:
        ready: Seconds from the start of the backward until the last gradient of the bucket is ready.
        bytes: Size of all gradients of the bucket, in bytes.
    """

    ready: float
    bytes: float


def all_reduce(cluster: Cluster, first: int, count: int) -> Time:
    """Return a function that predicts the seconds of a ring all-reduce from the number of bytes.

    Args:
        cluster: The cluster.
        first: First device of the ring.
        count: Number of devices of the ring. Their numbers are consecutive.
    """
    if count < 2:
        return lambda size: 0.0
    ring = cluster.ring(first, count)
    return lambda size: ring.all_reduce_time(size, count)


def all_gather(cluster: Cluster, first: int, count: int) -> Time:
    """Return a function that predicts the seconds of a ring all-gather from the number of bytes of one device.

    The arguments are those of :func:`all_reduce`.
    """
    if count < 2:
        return lambda size: 0.0
    ring = cluster.ring(first, count)
    return lambda size: ring.all_gather_time(size, count)


def buckets(
    gradients: Iterable[tuple[float, int]], size: int = BUCKET_BYTES, first: int | None = None
) -> list[BucketCost]:
    """Divide gradients into buckets, in the order in which the backward computes the gradients.

    Args:
        gradients: The gradients in order of time. For each gradient: the seconds from the start of the backward until
            the gradient is ready, and its bytes.
        size: Number of bytes from which a bucket is complete.
        first: Number of bytes from which the first bucket is complete; None for `size`.
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


def reduced_at(parts: Sequence[BucketCost], backward: float, time: Time, busy: float = 0.0) -> float:
    """Return the seconds from the start of the backward until the backward and all reductions have ended.

    The reduction of bucket k begins when the bucket is ready (at r_k) and bucket k - 1 has been reduced (at c_{k-1}).
    If the reduction of its s_k bytes takes the time A(s_k), it ends at c_k = max(c_{k-1}, r_k) + A(s_k).

    Args:
        parts: Buckets in the order of the backward.
        backward: Seconds of the backward.
        time: Function that returns the seconds in which a number of bytes is reduced.
        busy: Seconds at the start of the backward in which the connections send something else.
    """
    end = busy
    for part in parts:
        end = max(end, part.ready) + time(part.bytes)
    return max(end, backward)


@dataclass(frozen=True)
class StageCost:
    """The costs of a stage for one microbatch.

    Attributes:
        nodes: Number of nodes of the stage.
        forward: Seconds of the forward.
        backward: Seconds of the backward.
        parameter_bytes: Bytes of the stage's parameters.
        received_bytes: Bytes of the stage's inputs.
        saved_bytes: Bytes of the tensors that the stage makes and autograd keeps until the backward.
        gradients: The nodes' gradients in the order of the backward. For each node: the seconds from the start of the
            backward until its gradients are ready, and the bytes of its gradients.
        statistics_bytes: Bytes of the stage's means and variances of batch normalisation; see `NodeCost`.
        result_bytes: Bytes of the network's result, of which each replica of the last stage gets that of the whole
            batch; 0 in other stages.
    """

    nodes: int
    forward: float
    backward: float
    parameter_bytes: int
    received_bytes: int
    saved_bytes: int
    gradients: tuple[tuple[float, int], ...] = ()
    statistics_bytes: int = 0
    result_bytes: int = 0

    def buckets(self, size: int, backward: float, first: int | None = None) -> list[BucketCost]:
        """Return the buckets in which the stage's gradients are reduced.

        Args:
            size: Number of bytes from which a bucket is complete.
            backward: Seconds of the backward on the device that runs the stage. The times at which gradients are ready
                are scaled in proportion.
            first: Number of bytes from which the first bucket is complete; None for `size`.
        """
        if not self.gradients:
            return []
        # If the forward is recomputed, the recomputation precedes the backward of the nodes. All gradients are ready
        # later by the seconds that the recomputation takes.
        late = self.backward - self.gradients[-1][0]
        scale = backward / self.backward if self.backward else 1.0
        return buckets((((late + ready) * scale, count) for ready, count in self.gradients), size, first)

    @property
    def time(self) -> float:
        """Seconds of the stage's forward and backward for one microbatch."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageMessage:
    """The sizes of the messages that two stages send to each other for one microbatch.

    Attributes:
        bytes: Size in bytes of the values that the earlier stage sends to the later stage.
        gradient_bytes: Size in bytes of the gradients that the later stage sends back.
    """

    bytes: int
    gradient_bytes: int


def stage_costs(costs: GraphCosts, cuts: Sequence[int]) -> list[StageCost]:
    """Return the costs of each stage of a divided network.

    Args:
        costs: Costs of the network's nodes.
        cuts: Index of the first node of each stage except stage 0, ascending.
    """
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
                statistics_bytes=sum(node.statistics_bytes for node in nodes),
                result_bytes=costs.output_bytes if index == len(cuts) else 0,
            )
        )
    return stages


def _gradients(nodes: Sequence[NodeCost]) -> tuple[tuple[float, int], ...]:
    """Return, for each node, the time at which its gradients are ready, and the bytes of its gradients.

    Times are in seconds from the start of the last node's backward. The last node comes first, as in the backward.
    """
    ready = itertools.accumulate(node.backward for node in reversed(nodes))
    return tuple((time, node.parameter_bytes) for time, node in zip(ready, reversed(nodes), strict=True))


def messages(costs: GraphCosts, cuts: Sequence[int]) -> dict[tuple[int, int], StageMessage]:
    """Return the messages between stages. Keys are pairs of the sending and the receiving stage.

    A value is sent directly from the stage that makes the value to every other stage that uses the value. Each of these
    stages receives the value only once, even if several nodes of the stage use it.
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

    The result counts activations, gradients of activations, gradients of parameters, the means and variances of batch
    normalisation, and the network's results that replicas of the last stage send each other.
    """
    passing = sum(message.bytes + message.gradient_bytes for message in messages(costs, layout.cuts).values())
    among_replicas = sum(
        (count - 1) * (2 * stage.parameter_bytes + count * stage.statistics_bytes + microbatches * stage.result_bytes)
        for count, stage in zip(layout.replicas, stage_costs(costs, layout.cuts), strict=True)
    )
    return passing * microbatches + among_replicas
