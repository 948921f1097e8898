"""Choose where to cut a network and how often to replicate each stage, from the costs of its nodes.

A dynamic programme over the topological order proposes layouts by a closed-form model of the step time, in
the manner of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019),
section 3.1, which minimises the time of the slowest stage; here the fill and drain of a synchronous step
count too. The simulator then ranks the proposals, and a local search moves cuts and replicas while the
predicted time falls.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.pipeline.costs import GraphCosts, Link
from cnnstrategies.pipeline.layout import Layout

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Choices = dict[tuple[int, int], tuple[Integers, Integers]]

POSITIONS = 128  # of a large network, which a dynamic programme looks at: at most 1 % off in balance
BOUND_STEP = 0.01  # of the bound on the slowest stage, as a share of the step time
SLACK = 1.2  # a proposal may take so many times the best proposal's time, since the model is not the simulator
PROPOSALS = 24  # that the simulator ranks
REFINED = 6  # of the ranked, each with other replicas, that the local search starts from
MOVES = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # of cuts in the local search, in places to cut


@dataclass(frozen=True)
class Problem:
    """What the layout is chosen for.

    Attributes:
        costs: Costs of the nodes for one microbatch.
        link: Connection between any two devices.
        microbatches: Microbatches of a step.
        in_flight: Most microbatches that a replica holds, from (stages from this one to the last, replicas of
            this stage): 1 for the last stage of 1f1b, all of the replica's microbatches for gpipe.
        state_copies: Copies of the parameters that training holds: parameters, gradients, optimizer state.
        memory_limit: Bytes that a device may hold; unlimited when None.
    """

    costs: GraphCosts
    link: Link
    microbatches: int
    in_flight: Callable[[int, int], int]
    state_copies: int = 3
    memory_limit: int | None = None


def best_layout(
    problem: Problem,
    predict: Callable[[Layout], float],
    devices: int,
    stages: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Layout | None:
    """The layout with the least predicted step time that was found.

    Args:
        problem: Costs and limits.
        predict: Step time of a layout in seconds, infinite where it does not fit into memory.
        devices: Devices to use: all of them, but when neither stages nor replicas are given, as many as pay.
        stages: Number of stages; chosen when left out.
        replicas: Replicas of each stage; chosen when left out.

    Returns:
        The layout, or None where none fits into memory or the network has too few places to cut.
    """
    times: dict[Layout, float] = {}

    def time_of(layout: Layout) -> float:
        if layout not in times:
            times[layout] = predict(layout)
        return times[layout]

    proposals = sorted(propose(problem, devices, stages, replicas).items(), key=lambda item: item[1])
    ranked = sorted((layout for layout, _ in proposals[:PROPOSALS]), key=time_of)
    if replicas is None:
        swapped = {other for layout in ranked[:REFINED] for other in _with_two_stages_swapped(layout)}
        ranked = sorted({*ranked, *swapped}, key=lambda layout: (time_of(layout), layout.cuts, layout.replicas))
    starts: dict[tuple[int, ...], Layout] = {}
    for layout in ranked:
        starts.setdefault(layout.replicas, layout)
    for start in itertools.islice(starts.values(), REFINED):
        _descend(start, problem.costs.cut_positions, time_of, problem.microbatches if replicas is None else 0)
    shortest = min(times.values(), default=math.inf)
    if shortest == math.inf:
        return None
    # A device that gains less than 2 % is better left out.
    good = [layout for layout, time in times.items() if time <= 1.02 * shortest]
    return min(good, key=lambda layout: (layout.devices, times[layout]))


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
                    total = self._extend(tails[count - 1, used - replicas], count, replicas, bound)
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
                    total = self._extend(tail, others + 1, replicas, bound)[0]
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

    def _extend(self, tail: Floats, count: int, replicas: int, bound: float) -> Floats:
        """Time from each start position to the end and back when the stage ends at each end position."""
        problem = self.problem
        total: Floats = self.time + (self.transfer + tail)[None, :]
        window = problem.in_flight(count, replicas)
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
            reduce = 2 * (replicas - 1) * (link.latency + self.parameters / replicas / link.bandwidth)
            # Gradients are reduced while this stage's last backward and those of the stages before it run.
            self.slowest[replicas] = (rounds - 1) * period + np.maximum(0.0, reduce - self.drain[None, :])
        return self.slowest[replicas]

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


def _descend(start: Layout, positions: Sequence[int], time_of: Callable[[Layout], float], most_replicas: int) -> None:
    """Move to the best neighbour while that is faster; every layout seen is known to ``time_of``."""
    here = start
    while True:
        best = min(_neighbours(here, positions, most_replicas), key=time_of, default=here)
        if time_of(best) >= time_of(here):
            return
        here = best


def _neighbours(layout: Layout, positions: Sequence[int], most_replicas: int) -> Iterator[Layout]:
    """Layouts with a run of cuts moved by some places, pushing others ahead, or with one replica moved."""
    places = [bisect.bisect_left(positions, cut) for cut in layout.cuts]
    for first, last in itertools.combinations(range(len(places) + 1), 2):
        for step in MOVES:
            moved = [place + step if first <= number < last else place for number, place in enumerate(places)]
            for number in range(last, len(moved)) if step > 0 else ():
                moved[number] = max(moved[number], moved[number - 1] + 1)
            for number in range(first - 1, -1, -1) if step < 0 else ():
                moved[number] = min(moved[number], moved[number + 1] - 1)
            if moved[0] >= 0 and moved[-1] < len(positions):
                yield Layout(tuple(positions[place] for place in moved), layout.replicas)
    for giver, taker in itertools.permutations(range(len(layout.replicas)), 2):
        if layout.replicas[giver] > 1 and layout.replicas[taker] < most_replicas:
            replicas = list(layout.replicas)
            replicas[giver] -= 1
            replicas[taker] += 1
            yield Layout(layout.cuts, tuple(replicas))


def _with_two_stages_swapped(layout: Layout) -> Iterator[Layout]:
    for left, right in itertools.combinations(range(len(layout.replicas)), 2):
        replicas = list(layout.replicas)
        replicas[left], replicas[right] = replicas[right], replicas[left]
        yield Layout(layout.cuts, tuple(replicas))


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
