"""Propose layouts by dynamic programming over the topological order of the nodes.

The model of the step time is closed: the time of one microbatch through all stages and back, and what the slowest
stage adds for the others. It is that of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training" (2019), section 3.1, which minimises the time of the slowest stage; here the fill and drain of a synchronous
step count too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.pipeline.gradients import BUCKET_BYTES
from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.costs import GraphCosts, Link

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Choices = dict[tuple[int, int], tuple[Integers, Integers]]

POSITIONS = 128  # of a large network, which a dynamic programme looks at: at most 1 % off in balance
BOUND_STEP = 0.01  # of the bound on the slowest stage, as a share of the step time
SLACK = 1.2  # a proposal may take so many times the best proposal's time, since the model is not the simulator


@dataclass(frozen=True)
class Problem:
    """What the layout is chosen for.

    Attributes:
        costs: Costs of the nodes for one microbatch.
        link: Connection between any two devices.
        microbatches: Microbatches of a step.
        in_flight: Most microbatches that a replica holds, from (devices of this stage and those behind it,
            replicas of this stage): 1 for the last stage of 1f1b, all of the replica's microbatches for gpipe.
        state_copies: Copies of the parameters that training holds: parameters, gradients, optimizer state.
        memory_limit: Bytes that a device may hold; unlimited when None.
    """

    costs: GraphCosts
    link: Link
    microbatches: int
    in_flight: Callable[[int, int], int]
    state_copies: int = 3
    memory_limit: int | None = None


def propose(
    problem: Problem, devices: int, stages: int | None = None, replicas: Sequence[int] | None = None
) -> dict[Layout, float]:
    """Layouts that the dynamic programme finds, with the step time by its model in seconds.

    For a bound on what the slowest stage adds to the step, the programme finds the cuts with the least sum
    of times and transfers; the bound runs over the range that matters.
    """
    programme = Programme(problem, devices, stages, replicas)
    found = programme.solve(np.inf)
    if not found:
        return {}
    compute = problem.costs.forward_time + problem.costs.backward_time
    # The smallest bound that a layout keeps, by bisection; below it there is nothing.
    low, high = 0.0, min(found.values())
    while high - low > BOUND_STEP * (compute + high):
        middle = (low + high) / 2
        solved = programme.solve(middle)
        found |= solved
        low, high = (low, middle) if solved else (middle, high)
    # A layout whose slowest stage exceeds the bound takes at least the compute time and the bound.
    bound = high
    while compute + bound < SLACK * min(found.values()):
        found |= programme.solve(bound)
        bound += BOUND_STEP * (compute + bound)
    return found


class Programme:
    """Dynamic programme from the last stage to the first.

    For each (stages, devices) from the end and each start position it holds the least time that a
    microbatch takes from there to the end and back, under a bound on the slowest stage.

    Args:
        problem: Costs and limits.
        devices: Devices to use: all of them, but when neither stages nor replicas are given, as many as pay.
        stages: Number of stages; any when None.
        replicas: Replicas of each stage; any when None.
    """

    def __init__(self, problem: Problem, devices: int, stages: int | None, replicas: Sequence[int] | None) -> None:
        costs = problem.costs
        self.problem = problem
        self.devices = devices
        self.positions = np.array([0, *_thin(costs), len(costs.nodes)])
        most = min(len(replicas) if replicas else stages or devices, len(self.positions) - 1)
        self.most_stages = most
        self.counts = {len(replicas)} if replicas else {stages} if stages else set(range(1, most + 1))
        self.replicas = replicas
        self.idle = stages is None and replicas is None
        time = _prefix([node.forward + node.backward for node in costs.nodes])[self.positions]
        parameters = _prefix([node.parameter_bytes for node in costs.nodes])[self.positions]
        saved = _prefix([node.saved_bytes for node in costs.nodes])[self.positions]
        self.drain = _prefix([node.backward for node in costs.nodes])[self.positions]
        self.sent = np.array(costs.sent_bytes, dtype=float)[self.positions]
        self.gradients = np.array(costs.sent_gradient_bytes, dtype=float)[self.positions]
        # Matrices by (start position, end position).
        self.ordered = _upper(len(self.positions))
        self.time = time[None, :] - time[:, None]
        self.parameters = parameters[None, :] - parameters[:, None]
        received = self.sent + np.where(self.positions == 0, costs.input_bytes, 0)
        self.kept = saved[None, :] - saved[:, None] + received[:, None]
        link = problem.link
        self.transfer = np.array(
            [link.time(int(a)) + link.time(int(g)) for a, g in zip(self.sent, self.gradients, strict=True)]
        )
        self.slowest: dict[int, Floats] = {}

    def solve(self, bound: float) -> dict[Layout, float]:
        """The best layouts whose slowest stage stays within the bound.

        One for each permitted number of stages and each number of replicas of the first.

        Args:
            bound: Seconds that the slowest stage may add to the time of one microbatch.

        Returns:
            Step time by the model, in seconds, for each layout.
        """
        last = len(self.positions) - 1
        start = np.full(last + 1, np.inf)
        start[last] = 0.0
        tails: dict[tuple[int, int], Floats] = {(0, 0): start}
        choices: Choices = {}
        for count in range(1, self.most_stages + 1):
            for used in range(count, self.devices + 1):
                best = np.full(last + 1, np.inf)
                ends = np.zeros(last + 1, dtype=np.int64)
                chosen = np.zeros(last + 1, dtype=np.int64)
                for replicas in self._options(count, used - count + 1):
                    if (count - 1, used - replicas) not in tails:
                        continue
                    total = self._extend(tails[count - 1, used - replicas], used, replicas, bound)
                    end = total.argmin(axis=1)
                    value = total[np.arange(last + 1), end]
                    better = value < best
                    best = np.where(better, value, best)
                    ends = np.where(better, end, ends)
                    chosen = np.where(better, replicas, chosen)
                if np.isfinite(best).any():
                    tails[count, used] = best
                    choices[count, used] = (ends, chosen)
        found = {}
        for (others, rest), tail in tails.items():
            if others + 1 not in self.counts:
                continue
            for replicas in self._options(others + 1, self.devices - rest):
                if self.idle or rest + replicas == self.devices:
                    total = self._extend(tail, rest + replicas, replicas, bound)[0]
                    end = int(total.argmin())
                    if np.isfinite(total[end]):
                        layout, slowest = self._read(choices, (others, rest), end, replicas)
                        found[layout] = float(total[end]) + slowest
        return found

    def _options(self, count: int, most: int) -> Sequence[int]:
        """Replicas that the stage at this place from the end can have."""
        if self.replicas is not None:
            return [self.replicas[-count]]
        return range(1, min(most, self.problem.microbatches) + 1)

    def _extend(self, tail: Floats, devices: int, replicas: int, bound: float) -> Floats:
        """Time from each start position to the end and back when the stage ends at each end position."""
        problem = self.problem
        total: Floats = self.time + (self.transfer + tail)[None, :]
        window = problem.in_flight(devices, replicas)
        possible = self.ordered & (self._slowest_of(replicas) <= bound)
        rounds = -(-problem.microbatches // replicas)
        if rounds > window:
            # A replica that may hold only some microbatches waits for the first of them to come back.
            possible &= (rounds - window) * total / window <= bound
        if problem.memory_limit is not None:
            needed = problem.state_copies * self.parameters + min(window, rounds) * self.kept
            possible &= needed <= problem.memory_limit
        return np.where(possible, total, np.inf)

    def _slowest_of(self, replicas: int) -> Floats:
        """What a stage with so many replicas adds to the step after its first microbatch, by (start, end)."""
        if replicas not in self.slowest:
            link = self.problem.link
            rounds = -(-self.problem.microbatches // replicas)
            # Each device sends and receives through one port per direction.
            incoming = self.sent[:, None] + self.gradients[None, :]
            outgoing = self.sent[None, :] + self.gradients[:, None]
            period = np.maximum(self.time, np.maximum(incoming, outgoing) / link.bandwidth)
            # Gradients are reduced while this stage's last backward and those of the stages before it run; the last
            # bucket only while the latter run.
            reduce = self._reduce_time(self.parameters, replicas) - self.drain[None, :]
            bucket = self._reduce_time(np.minimum(self.parameters, BUCKET_BYTES), replicas) - self.drain[:, None]
            self.slowest[replicas] = (rounds - 1) * period + np.maximum(0.0, np.maximum(reduce, bucket))
        return self.slowest[replicas]

    def _reduce_time(self, sizes: Floats, replicas: int) -> Floats:
        link = self.problem.link
        return 2 * (replicas - 1) * (link.latency + sizes / replicas / link.bandwidth)

    def _read(self, choices: Choices, rest: tuple[int, int], end: int, replicas: int) -> tuple[Layout, float]:
        """The layout whose first stage ends here with so many replicas, and what its slowest stage adds."""
        slowest = float(self._slowest_of(replicas)[0, end])
        cuts, chosen = [], [replicas]
        count, used = rest
        for remaining in range(count, 0, -1):
            position = end
            ends, numbers = choices[remaining, used]
            end, replicas = int(ends[position]), int(numbers[position])
            slowest = max(slowest, float(self._slowest_of(replicas)[position, end]))
            cuts.append(int(self.positions[position]))
            chosen.append(replicas)
            used -= replicas
        return Layout(tuple(cuts), tuple(chosen)), slowest


def _thin(costs: GraphCosts) -> list[int]:
    """At most ``POSITIONS`` cut positions: in each slice of the compute time the one that sends least."""
    if len(costs.cut_positions) <= POSITIONS:
        return list(costs.cut_positions)
    time = _prefix([node.forward + node.backward for node in costs.nodes])
    cheapest: dict[int, int] = {}
    for position in costs.cut_positions:
        part = int(time[position] / time[-1] * POSITIONS)
        if part not in cheapest or costs.sent_bytes[position] < costs.sent_bytes[cheapest[part]]:
            cheapest[part] = position
    return sorted(cheapest.values())


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values, dtype=float)])


def _upper(size: int) -> NDArray[np.bool_]:
    return np.triu(np.ones((size, size), dtype=bool), k=1)
