"""Times and bytes of all possible stages at once, as matrices by start and end, for the dynamic program."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.planning.collectives import BUCKET_BYTES
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.places import Place
from cnnstrategies.planning.problem import Problem

Floats = NDArray[np.float64]

POSITIONS = 64  # of a large network, between which stages are searched for; a local search moves the cuts afterwards
HEAVY = 8  # of them before the nodes with most parameters


class Slices:
    """What a stage from one cut position to another costs for one microbatch, on a device of speed 1.

    Args:
        problem: Costs and limits.

    Attributes:
        positions: Starts and ends of stages, ascending, with the network's own.
        time: Forward and backward.
        parameters: Bytes.
        kept: Bytes for each microbatch in flight.
        held: Bytes beyond those and the training state.
        ordered: Whether the end is behind the start.
    """

    def __init__(self, problem: Problem) -> None:
        costs = problem.costs
        at = self.positions = np.array([0, *thin(costs), len(costs.nodes)])
        self.ordered: NDArray[np.bool_] = np.triu(np.ones((len(at), len(at)), dtype=bool), k=1)
        self.time = _between(problem.time_before[at])
        self.parameters = _between(problem.parameters_before[at])
        saved = _between(problem.saved_before[at])
        self.drain = problem.drain_before[at]
        self.sent = np.array(costs.sent_bytes, dtype=float)[at]
        self.gradients = np.array(costs.sent_gradient_bytes, dtype=float)[at]
        received = (self.sent + np.where(at == 0, costs.input_bytes, 0))[:, None] + np.zeros(saved.shape)
        self.kept = received if problem.recomputes else received + saved
        self.held = saved if problem.recomputes else np.zeros(saved.shape)

    def transfer(self, link: Link | None) -> Floats:
        """Seconds in which a microbatch passes each position, and its gradient comes back."""
        if link is None:
            return np.zeros(len(self.positions))
        return np.array([link.time(a) + link.time(g) for a, g in zip(self.sent, self.gradients, strict=True)])

    def slowest(
        self, place: Place, replicas: NDArray[Any], start: Any = None, end: Any = None
    ) -> tuple[Floats, Floats]:
        """What stages add to the step for each microbatch of a replica after its first, and once.

        Args:
            place: Where they are.
            replicas: Of each stage.
            start: Index of its start among the positions; all by all when left out.
            end: The same of its end.
        """
        if start is None:
            start, end = np.ogrid[: len(self.positions), : len(self.positions)]
        # Each device sends and receives through one port per direction; those of a machine may share theirs.
        incoming = self.sent[start] + self.gradients[end]
        outgoing = self.sent[end] + self.gradients[start]
        sharing = np.minimum(replicas, place.shared_by)
        period = np.maximum(
            self.time[start, end] / place.speed, np.maximum(incoming, outgoing) * sharing / place.port.bandwidth
        )
        # Gradients are reduced while this stage's last backward and those of the stages before it run; the last
        # bucket only while the latter run.
        parameters = self.parameters[start, end]
        reduce = _ring(place.ring, parameters, replicas) - self.drain[end] / place.speed
        bucket = _ring(place.ring, np.minimum(parameters, BUCKET_BYTES), replicas) - self.drain[start] / place.speed
        return period, np.maximum(0.0, np.maximum(reduce, bucket))


def thin(costs: GraphCosts) -> list[int]:
    """At most ``POSITIONS`` cut positions.

    Those before the nodes with most parameters, and of each slice of the compute time the one that sends least.
    """
    if len(costs.cut_positions) <= POSITIONS:
        return list(costs.cut_positions)
    heavy = sorted(costs.cut_positions, key=lambda position: -costs.nodes[position].parameter_bytes)[:HEAVY]
    time = np.concatenate([[0.0], np.cumsum([node.forward + node.backward for node in costs.nodes])])
    cheapest: dict[int, int] = {}
    for position in costs.cut_positions:
        part = int(time[position] / max(time[-1], 1e-12) * (POSITIONS - HEAVY - 1))
        if part not in cheapest or costs.sent_bytes[position] < costs.sent_bytes[cheapest[part]]:
            cheapest[part] = position
    return sorted({*cheapest.values(), *heavy})


def _between(before: Sequence[float] | Floats) -> Floats:
    values = np.asarray(before, dtype=float)
    return np.asarray(values[None, :] - values[:, None])


def _ring(link: Link, sizes: Floats, members: NDArray[Any]) -> Floats:
    return np.asarray(2 * (members - 1) * (link.latency + sizes / members / link.bandwidth))
