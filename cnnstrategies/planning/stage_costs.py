"""What the stages of a layout cost, and what passes between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from cnnstrategies.planning.costs import GraphCosts


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
    """

    nodes: int
    forward: float
    backward: float
    parameter_bytes: int
    received_bytes: int
    saved_bytes: int

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
    """The costs of the stages that the cuts make.

    Args:
        costs: Costs of the nodes.
        cuts: First node of each stage but the first.
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
            )
        )
    return stages


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
