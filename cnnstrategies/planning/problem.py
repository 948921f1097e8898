"""What a layout is chosen for, and the closed model of its step time."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timetable import Order, in_flight
from cnnstrategies.planning.candidates import Checkpointing
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.places import Place, Places, places_of
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, all_reduce

Floats = NDArray[np.float64]
POSITIONS = 64  # of a large network, between which stages are searched for; a local search moves the cuts afterwards
HEAVY = 8  # of them before the nodes with most parameters


@dataclass(frozen=True)
class Request:
    """What a plan is made for.

    Attributes:
        devices: Devices to use.
        microbatches: Microbatches of a step.
        schedule: Name of the schedule.
        stages: Number of stages; chosen when None.
        replicas: Replicas of each stage; chosen when None.
        cuts: First node of each stage but the first; chosen when None.
        memory_limit: Bytes that a device may hold; unlimited when None.
        activation_checkpointing: Whether a stage keeps only its inputs and runs its forward again before the
            backward: for no microbatch, for all but the last, or for all.
        run_ahead: Whether stages hold one microbatch more, so that messages travel while they compute; chosen when
            None: where it gains time and fits into memory.
        state_copies: Copies of the parameters that training holds: parameters, gradients, optimizer state.
        placement: How ranks are numbered; chosen when None.
    """

    devices: int
    microbatches: int
    schedule: str = "1f1b"
    stages: int | None = None
    replicas: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    memory_limit: int | None = None
    activation_checkpointing: Checkpointing = "never"
    run_ahead: bool | None = None
    state_copies: int = 3
    placement: Order | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """What a layout is chosen for.

    Attributes:
        costs: Costs of the nodes for one microbatch.
        cluster: Its devices are the ranks, in order.
        request: What is asked for.
        memory_limit: Bytes that a device may hold, where layouts that need more are left out.
    """

    costs: GraphCosts
    cluster: Cluster
    request: Request
    memory_limit: int | None = None

    @property
    def recomputes(self) -> bool:
        """Whether a stage keeps only its inputs and runs its forward again before the backward."""
        return self.request.activation_checkpointing != "never"

    @cached_property
    def time_before(self) -> Floats:
        """Seconds of forward and backward of the nodes before each position."""
        forwards = 2 if self.recomputes else 1
        return _before([forwards * node.forward + node.backward for node in self.costs.nodes])

    @cached_property
    def drain_before(self) -> Floats:
        """Seconds of the backward of the nodes before each position."""
        return _before([node.backward for node in self.costs.nodes])

    @cached_property
    def parameters_before(self) -> Floats:
        """Bytes of the parameters of the nodes before each position."""
        return _before([node.parameter_bytes for node in self.costs.nodes])

    @cached_property
    def saved_before(self) -> Floats:
        """Bytes that the nodes before each position make and keep until the backward."""
        return _before([node.saved_bytes for node in self.costs.nodes])

    @cached_property
    def places(self) -> Places:
        """Where stages can be."""
        return places_of(self.cluster)

    @property
    def compute_time(self) -> float:
        """Seconds of the whole network for one microbatch, on the quickest device."""
        return float(self.time_before[-1]) / max(self.cluster.speeds)

    def flights(self, replicas: Sequence[int], stage: int, run_ahead: bool) -> int:
        """Most microbatches that a replica of a stage holds at once."""
        rounds = -(-self.request.microbatches // replicas[stage])
        return min(in_flight(replicas, stage, run_ahead), rounds) if self.request.schedule == "1f1b" else rounds

    def model(self, layout: Layout) -> float:
        """Step time in seconds: one microbatch through all stages and back, and what the slowest adds for the rest."""
        fill, slowest = 0.0, 0.0
        for time, transfer, others in self._stages(layout):
            fill += time + transfer
            slowest = max(slowest, others)
        return fill + slowest

    def bound(self, layout: Layout) -> float:
        """A step time that the layout cannot fall below: one stage's work after one pass of those before it."""
        bounds = (0, *layout.cuts, len(self.costs.nodes))
        used, before, longest = layout.devices, 0.0, 0.0
        for stage, replicas in enumerate(layout.replicas):
            used -= replicas
            first = self.cluster.devices - used - replicas
            speeds = self.cluster.speeds[first : first + replicas]
            time = float(self.time_before[bounds[stage + 1]] - self.time_before[bounds[stage]])
            # The first replica has one microbatch more, if any has; a quick one may have it.
            rounds = -(-self.request.microbatches // replicas)
            longest = max(longest, before + rounds * time / max(speeds))
            before += time / max(speeds)
        return longest

    def filled(self, layout: Layout) -> Layout:
        """The layout with the devices that it leaves out, each given to the stage that is slowest then."""
        replicas = list(layout.replicas)
        bounds = (0, *layout.cuts, len(self.costs.nodes))
        times = [float(self.time_before[b] - self.time_before[a]) for a, b in itertools.pairwise(bounds)]
        queue = [(-time / count, stage) for stage, (time, count) in enumerate(zip(times, replicas, strict=True))]
        heapq.heapify(queue)
        spare = self.cluster.devices - sum(replicas)
        while spare and queue:
            _, stage = heapq.heappop(queue)
            if replicas[stage] < self.request.microbatches:
                replicas[stage] += 1
                spare -= 1
                heapq.heappush(queue, (-times[stage] / replicas[stage], stage))
        return Layout(layout.cuts, tuple(replicas))

    def _stages(self, layout: Layout) -> list[tuple[float, float, float]]:
        """Of each stage the time of a microbatch, that of its transfer to the next, and what the others add."""
        costs, places = self.costs, self.places
        bounds = (0, *layout.cuts, len(costs.nodes))
        used, result = layout.devices, []
        for stage, replicas in enumerate(layout.replicas):
            used -= replicas
            start, end = bounds[stage], bounds[stage + 1]
            place = places.kinds[places.kind(used, replicas)]
            time = float(self.time_before[end] - self.time_before[start]) / place.speed
            link = places.transfer[used]
            transfer = link.time(costs.sent_bytes[end]) + link.time(costs.sent_gradient_bytes[end]) if link else 0.0
            incoming = costs.sent_bytes[start] + costs.sent_gradient_bytes[end]
            outgoing = costs.sent_bytes[end] + costs.sent_gradient_bytes[start]
            port = max(incoming, outgoing) * min(replicas, place.shared_by) / place.port.bandwidth
            parameters = float(self.parameters_before[end] - self.parameters_before[start])
            reduction = all_reduce(self.cluster, self.cluster.devices - used - replicas, replicas)
            whole = reduction(parameters) - self.drain_before[end] / place.speed
            bucket = reduction(min(parameters, BUCKET_BYTES)) - self.drain_before[start] / place.speed
            rounds = -(-self.request.microbatches // replicas)
            result.append((time, transfer, (rounds - 1) * max(time, port) + max(0.0, float(whole), float(bucket))))
        return result


def _before(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values, dtype=float)])


class Slices:
    """What a stage from one cut position to another costs for one microbatch, on a device of speed 1.

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
