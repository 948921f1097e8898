"""Propose layouts by dynamic programming over the topological order of the nodes.

The model of the step time is closed: the time of one microbatch through all stages and back, and what the slowest
stage adds for the others. It is that of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN
Training" (2019), section 3.1, which minimises the time of the slowest stage; here the fill and drain of a synchronous
step count too. More replicas shorten the slowest stage and never the fill. So under a bound on the slowest stage each
stage takes the fewest replicas that keep it, and only cuts are searched for.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.problem import Floats, Problem, Slices

Integers = NDArray[np.int64]

SMALL = 8  # devices up to which nothing is left out of the program
BOUNDS = 24  # on the slowest stage, for a cluster larger than that
BOUND_STEP = 0.01  # between two bounds at least, as a share of the step time
SLACK = 1.2  # a proposal may take so many times the best proposal's time, since the model is not the simulator
NEVER = 2**40  # replicas that no stage has


def propose(problem: Problem, stages: int | None = None, replicas: Sequence[int] | None = None) -> dict[Layout, float]:
    """Layouts that the dynamic program finds, with the step time by its model in seconds.

    For a bound on what the slowest stage adds to the step, the program finds the cuts with the least sum
    of times and transfers; the bound runs over the range that matters.
    """
    program = DynamicProgram(problem, stages, replicas)
    found = program.solve(np.inf)
    if not found:
        return {}
    compute = problem.compute_time
    small = problem.cluster.devices <= SMALL
    # The smallest bound that a layout keeps, by bisection; below it there is nothing.
    low, high = 0.0, min(found.values())
    while high - low > (BOUND_STEP if small else 2 * BOUND_STEP) * (compute + high):
        middle = (low + high) / 2
        solved = program.solve(middle)
        found |= solved
        low, high = (low, middle) if solved else (middle, high)
    # A layout whose slowest stage exceeds the bound takes at least the compute time and the bound.
    bound = high
    least = 0.0 if small else (SLACK * min(found.values()) - compute - high) / BOUNDS
    while compute + bound < SLACK * min(found.values()):
        found |= program.solve(bound)
        bound += max(BOUND_STEP * (compute + bound), least)
    return found


class DynamicProgram:
    """Dynamic program from the last stage to the first.

    For each number of devices given out from the end and each start position it holds the least time that a
    microbatch takes from there to the end and back, under a bound on the slowest stage. Where the number of stages is
    fixed it holds that for each number of stages.

    Args:
        problem: Costs and limits.
        stages: Number of stages; any when None.
        replicas: Replicas of each stage; any when None.
    """

    def __init__(self, problem: Problem, stages: int | None, replicas: Sequence[int] | None) -> None:
        self.problem = problem
        self.devices = problem.cluster.devices
        self.slices = Slices(problem)
        self.last = len(self.slices.positions) - 1
        self.places = problem.places
        self.replicas = replicas
        self.stages = len(replicas) if replicas else stages
        self.speed = np.array([place.speed for place in self.places.kinds])
        self.transfers = np.array([self.slices.transfer(link) for link in self.places.transfer])
        # Where it is left open, a stage runs ahead if there is memory.
        self.ahead = problem.memory_limit is None if problem.request.run_ahead is None else problem.request.run_ahead
        self.prunes = self.stages is None and self.devices > SMALL
        # Numbers of devices with as much room in their machine, a row each; one more than there are fills it.
        alike = [np.flatnonzero(self.places.room == room) for room in np.unique(self.places.room)]
        longest = max(map(len, alike))
        self.by_room = np.array(
            [np.pad(rows, (0, longest - len(rows)), constant_values=self.devices + 1) for rows in alike]
        )

    def solve(self, bound: float) -> dict[Layout, float]:
        """The best layouts whose slowest stage stays within the bound.

        One for each number of devices that it leaves out, and one that uses all of them.

        Args:
            bound: Seconds that the slowest stage may add to the time of one microbatch.

        Returns:
            Step time by the model, in seconds, for each layout.
        """
        if self.stages is not None and self.stages > min(self.last, self.devices):
            return {}
        fewest = [self._fewest(kind, bound) for kind in range(len(self.places.kinds))]
        rounds = self.stages or 1
        # Where stages are not counted one table is enough, since a stage's tail begins behind it.
        tables = 1 if self.stages is None else rounds + 1
        tails = np.full((tables, self.devices + 1, self.last + 1), np.inf)
        tails[0, 0, self.last] = 0.0
        choices = np.zeros((rounds + 1, self.last + 1, self.devices + 1, 2), dtype=np.int64)
        for count in range(1, rounds + 1):
            into, out_of = (0, 0) if self.stages is None else (count, count - 1)
            for start in range(self.last - 1, -1, -1):
                if count == self.stages and start > 0:
                    continue
                self._extend(start, count, tails[out_of], tails[into], choices[count], fewest, bound)
                if self.prunes:
                    self._prune(tails[0], start)
        return self._layouts(tails[-1], choices)

    def _extend(
        self,
        start: int,
        count: int,
        tail: Floats,
        into: Floats,
        choices: Integers,
        fewest: Sequence[Integers],
        bound: float,
    ) -> None:
        """Put a stage that begins here before every tail that begins behind it."""
        given, behind = np.nonzero(np.isfinite(tail[: self.devices, start + 1 :]))
        end = behind + start + 1
        if self.replicas is not None:
            replicas = np.full(len(end), self.replicas[-count])
            wanted = [np.where(table[start, end] <= replicas, replicas, NEVER) for table in fewest]
        else:
            wanted = [table[start, end] for table in fewest]
        replicas = np.full(len(end), NEVER)
        kind = np.zeros(len(end), dtype=np.int64)
        for number in range(len(fewest) - 1, -1, -1):
            fits = wanted[number] <= self.places.reach[number, given]
            replicas = np.where(fits, wanted[number], replicas)
            kind = np.where(fits, number, kind)
        if self.problem.memory_limit is not None:
            replicas, kind = self._with_memory(start, end, given, replicas, bound)
        used = given + replicas
        time = self.slices.time[start, end] / self.speed[kind]
        value = time + self.transfers[given, end] + tail[given, end]
        keep = used <= self.devices
        if self.problem.request.schedule == "1f1b":
            # A replica that may hold only some microbatches waits for the first of them to come back.
            window = self._window(used, replicas, self.ahead)
            waits = -(-self.problem.request.microbatches // replicas) - window
            keep &= (waits <= 0) | (waits * value <= bound * window)
        used, value, given, end = used[keep], value[keep], given[keep], end[keep]
        np.minimum.at(into[:, start], used, value)
        best = value == into[used, start]
        choices[start, used[best], 0] = given[best]
        choices[start, used[best], 1] = end[best]

    def _fewest(self, kind: int, bound: float) -> Integers:
        """By start and end of a stage the fewest replicas that keep the bound in this kind of place."""
        place = self.places.kinds[kind]
        microbatches = self.problem.request.microbatches
        if self.replicas is not None:
            # Each place has the number that it is given; whether it keeps the bound is all there is to know.
            return self._kept_by_given(kind, bound)
        replicas = np.where(self.slices.ordered, 1, NEVER)
        while True:
            inside = np.where(replicas < NEVER, replicas, 1)
            period, open_ = self.slices.slowest(place, inside)
            spare = bound - open_
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                others = np.where(period > 0, np.floor(spare / period + 1e-9), np.inf)
            others = np.minimum(others, microbatches)
            needed = np.where(spare < 0, NEVER, np.ceil(microbatches / (1 + np.maximum(others, 0))))
            grown = np.where(replicas < NEVER, np.maximum(replicas, needed).astype(np.int64), NEVER)
            grown = np.where(grown > min(self.devices, microbatches), NEVER, grown)
            if np.array_equal(grown, replicas):
                return np.asarray(replicas, dtype=np.int64)
            replicas = grown

    def _kept_by_given(self, kind: int, bound: float) -> Integers:
        assert self.replicas is not None
        fewest = np.full(self.slices.time.shape, NEVER)
        for count in sorted(set(self.replicas), reverse=True):
            period, open_ = self.slices.slowest(self.places.kinds[kind], np.full(fewest.shape, count))
            rounds = -(-self.problem.request.microbatches // count)
            kept = self.slices.ordered & ((rounds - 1) * period + open_ <= bound)
            fewest = np.where(kept, count, fewest)
        return fewest

    def _with_memory(
        self, start: int, end: Integers, given: Integers, replicas: Integers, bound: float
    ) -> tuple[Integers, Integers]:
        """Replicas, no fewer than given, with which a stage fits into its devices, and the kinds of their places."""
        problem = self.problem
        assert problem.memory_limit is not None
        free = problem.memory_limit - problem.request.state_copies * self.slices.parameters[start, end]
        held = self.slices.held[start, end]
        each = self.slices.kept[start, end]
        with np.errstate(divide="ignore", invalid="ignore"):
            window = np.where(each > 0, np.floor((free - held) / each), np.where(free >= held, NEVER, 0))
        window = np.clip(window, 0, NEVER).astype(np.int64)
        if self.replicas is None:
            by_rounds = -(-problem.request.microbatches // np.maximum(window, 1))
            needed = by_rounds
            if problem.request.schedule == "1f1b":
                by_window = np.where(window > 1, -(-given // np.maximum(window - 1, 1)), np.where(given > 0, NEVER, 1))
                needed = np.minimum(by_window, by_rounds)
            replicas = np.maximum(replicas, needed)
        fits = (window >= 1) & (given + replicas <= self.devices)
        safe = np.where(fits, replicas, 1)
        kind = np.argmax(self.places.reach[:, given] >= safe[None, :], axis=0)
        rounds = -(-problem.request.microbatches // safe)
        window_here = self._window(given + safe, safe, bool(problem.request.run_ahead))
        peak = np.minimum(window_here, rounds) if problem.request.schedule == "1f1b" else rounds
        fits &= peak <= window
        for number in np.unique(kind):
            there = kind == number
            period, open_ = self.slices.slowest(self.places.kinds[number], safe[there], start, end[there])
            fits[there] &= (rounds[there] - 1) * period + open_ <= bound
        return np.where(fits, replicas, NEVER), kind

    @staticmethod
    def _window(used: Integers, replicas: Integers, run_ahead: bool) -> Integers:
        """Most microbatches that a replica holds; see :func:`cnnstrategies.pipeline.timetable.in_flight`."""
        usual = -(-used // replicas)
        return np.where(used > replicas, used // replicas + 1, usual) if run_ahead else usual

    def _prune(self, tail: Floats, start: int) -> None:
        """Forget tails that another one with fewer devices, and as much room in its machine, is no slower than."""
        column = tail[:, start]
        times = np.append(column, np.inf)[self.by_room]
        before = np.minimum.accumulate(np.pad(times[:, :-1], ((0, 0), (1, 0)), constant_values=np.inf), axis=1)
        # All devices in use is an end of its own.
        column[self.by_room[(times >= before) & (self.by_room < self.devices)]] = np.inf

    def _layouts(self, tail: Floats, choices: Integers) -> dict[Layout, float]:
        found = {}
        for used in np.flatnonzero(np.isfinite(tail[:, 0])):
            if self.replicas is not None and used != self.devices:
                continue
            layout = self._read(choices, int(used))
            found[layout] = self.problem.model(layout)
            if used < self.devices:
                filled = self.problem.filled(layout)
                found[filled] = self.problem.model(filled)
        if self.stages is not None:
            return {layout: time for layout, time in found.items() if layout.devices == self.devices}
        return found

    def _read(self, choices: Integers, used: int) -> Layout:
        cuts, replicas, start, count = [], [], 0, len(choices) - 1
        while start < self.last:
            table = choices[count]
            given, end = (int(number) for number in table[start, used])
            replicas.append(used - given)
            used, start = given, end
            count -= self.stages is not None
            cuts.append(int(self.slices.positions[start]))
        return Layout(tuple(cuts[:-1]), tuple(replicas))
