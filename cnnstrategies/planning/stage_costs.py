"""What the stages of a layout cost, and what passes between them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cnnstrategies.planning.collectives import Bucket, buckets, uniform
from cnnstrategies.planning.costs import GraphCosts, NodeCost


@dataclass(frozen=True)
class StageCost:
    """The costs of a stage for one microbatch.

    Attributes:
        nodes: Number of nodes.
        forward: Seconds of its forward.
        backward: Seconds of its backward.
        parameter_bytes: Bytes of its parameters.
        received_bytes: Bytes of its inputs.
        saved_bytes: Bytes that it makes and keeps until the backward.
        gradients: When the gradients of its nodes are ready, in seconds from the backward's start, and their bytes, in
            the order of the backward; where nothing is known they come evenly.
    """

    nodes: int
    forward: float
    backward: float
    parameter_bytes: int
    received_bytes: int
    saved_bytes: int
    gradients: tuple[tuple[float, int], ...] = ()

    def buckets(self, size: int, backward: float, first: int | None = None) -> list[Bucket]:
        """The gradients as they are reduced.

        Args:
            size: Bytes of a bucket.
            backward: Seconds that the backward takes on the device, at its speed and with what it recomputes.
            first: Bytes of the first bucket, where they differ.
        """
        if not self.gradients:
            return uniform(backward, self.parameter_bytes, size)
        late = self.backward - self.gradients[-1][0]  # What is recomputed comes before.
        scale = backward / self.backward if self.backward else 1.0
        return buckets((((late + ready) * scale, count) for ready, count in self.gradients), size, first)

    @property
    def time(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Message:
    """What one stage sends another for one microbatch.

    Attributes:
        bytes: Activations, forward.
        gradient_bytes: Their gradients, back.
    """

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


def messages(costs: GraphCosts, cuts: Sequence[int]) -> dict[tuple[int, int], Message]:
    """What passes between the stages, by (sending stage, receiving stage).

    A value goes straight to each stage that uses it, once.
    """
    stage_of = costs.stage_of(cuts)
    sums: dict[tuple[int, int], tuple[int, int]] = {}
    for value in costs.values:
        source = stage_of[value.producer]
        for target in {stage_of[consumer] for consumer in value.consumers} - {source}:
            size, gradient = sums.get((source, target), (0, 0))
            sums[source, target] = (size + value.bytes, gradient + value.gradient_bytes)
    return {pair: Message(*sizes) for pair, sizes in sorted(sums.items())}
