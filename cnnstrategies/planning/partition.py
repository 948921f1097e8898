"""Choose where to cut a network and how often to replicate each stage, from the costs of its nodes.

Of a few layouts all are looked at. Of many, a local search by the closed model of the step time begins at layouts whose
cuts are far apart; the simulator ranks where it ends, and from there the search goes on by simulated times.
"""

import bisect
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.problem import Problem

ALL = 800  # layouts: so few are all looked at
STARTS = 6400  # sets of cuts at most that the search by the model can begin at, for all numbers of stages
STAGES = 16  # at most where it is free
PROPOSALS = 24  # that the simulator ranks
VARIED = 12  # of the ranked, unlike each other, that a local search starts from
TOGETHER = 3  # cuts at most that a local search moves at once
STEPS = 50  # of a local search at most
SMALL = 8  # devices up to which all is simulated that may be the best
LIKELY = 12  # of some layouts for a larger cluster that are simulated
MOST = 60  # simulations for a larger cluster
SLACK = 1.2  # there the model's time may be so many times the best simulated one's, since the model is no simulator
MOVES = (-8, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 8)  # of cuts in a local search, in places to cut

# What a layout costs: bytes that it needs too many, then seconds.
Cost = tuple[float, float]


def best_layout(problem: Problem, cost: Callable[[Layout], Cost], model: Callable[[Layout], Cost]) -> Layout | None:
    """The layout that costs least of those that were found.

    Returns:
        The layout; None where the network has too few places to cut.
    """
    search = _Search(problem, cost, functools.cache(model))
    if not search.is_large and _number_of_layouts(problem) <= ALL:
        layouts = list(_layouts(problem))
        search.look_at(search.likeliest(layouts, PROPOSALS))
        search.look_at(layouts)
    else:
        free = problem.job.replicas is None
        starts = search.varied(search.likeliest(_starts(problem), STARTS), VARIED // 2 if free else VARIED)
        if free:
            # The model underrates what a stage on parts of two machines costs.
            starts += search.varied(search.likeliest(_on_whole_machines(problem), STARTS), VARIED // 2)
        ends = [search.descend(start, search.by_model) for start in starts]
        search.look_at(search.likeliest({*starts, *ends}, PROPOSALS))
        for start in search.varied(sorted(search.costs, key=search.costs.__getitem__), VARIED // 2):
            search.descend(start, search.by_simulation)
    return min(search.costs, key=search.costs.__getitem__, default=None)


class _Search:
    """The layouts that have been simulated, and which others are worth it."""

    def __init__(self, problem: Problem, cost: Callable[[Layout], Cost], model: Callable[[Layout], Cost]) -> None:
        self.is_large = problem.cluster.devices > SMALL
        self.problem = problem
        self.cost = cost
        self.model = model
        self.costs: dict[Layout, Cost] = {}
        self.least: Cost = (math.inf, math.inf)

    def likeliest(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Those that the model likes most."""
        found = heapq.nsmallest(count, ((self.model(one), one.cuts, one.replicas, one) for one in layouts))
        return [layout for *_, layout in found]

    def varied(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Of layouts in order the first few that no local search goes through on its way from one before."""
        found: dict[tuple[int, ...], list[list[int]]] = {}
        chosen: list[Layout] = []
        for layout in layouts:
            places = [bisect.bisect_left(self.problem.costs.cut_positions, cut) for cut in layout.cuts]
            others = found.setdefault(layout.replicas, [])
            if not others or all(
                max(map(abs, map(operator.sub, places, one)), default=0) > MOVES[-1] for one in others
            ):
                others.append(places)
                chosen.append(layout)
                if len(chosen) == count:
                    break
        return chosen

    def look_at(self, layouts: Iterable[Layout]) -> None:
        """Simulate the layouts, the likeliest first, but those that cannot be better than the best."""
        new = {layout for layout in layouts if layout not in self.costs}
        if self.is_large:
            # Each simulation takes long: only those that the model likes.
            excess, time = self.least
            new = {one for one in self.likeliest(new, LIKELY) if self.model(one) < (excess, SLACK * time)}
        for bound, layout in sorted(((self.problem.bound(one), one) for one in new), key=lambda pair: pair[0]):
            if (0.0, bound) > self.least or (self.is_large and len(self.costs) >= MOST):
                return
            self.costs[layout] = self.cost(layout)
            self.least = min(self.least, self.costs[layout])

    def by_model(self, layouts: set[Layout]) -> dict[Layout, Cost]:
        """What the model says of them."""
        return {layout: self.model(layout) for layout in layouts}

    def by_simulation(self, layouts: set[Layout]) -> dict[Layout, Cost]:
        """What is known of them after those that may be the best have been simulated."""
        self.look_at(layouts)
        return {layout: self.costs[layout] for layout in layouts if layout in self.costs}

    def descend(self, start: Layout, price: Callable[[set[Layout]], dict[Layout, Cost]]) -> Layout:
        """Move to the best neighbour while that costs less."""
        here = start
        for _ in range(STEPS):
            known = price({here, *_neighbours(here, self.problem)})
            best = min(known, key=known.__getitem__, default=here)
            if best == here or known[best] >= known[here]:
                break
            here = best
        return here


def _counts(problem: Problem) -> Sequence[int]:
    """The numbers of stages that are asked for, as far as there are devices and places to cut."""
    job, most = problem.job, min(problem.cluster.devices, len(problem.costs.cut_positions) + 1)
    if job.replicas is not None:
        wanted: Sequence[int] = [len(job.replicas)]
    else:
        wanted = range(1, STAGES + 1) if job.stages is None else [job.stages]
    return [count for count in wanted if count <= most]


def _number_of_layouts(problem: Problem) -> int:
    places, counts = len(problem.costs.cut_positions), _counts(problem)
    if problem.job.replicas is not None:
        return sum(math.comb(places, count - 1) for count in counts)
    return sum(math.comb(places, count - 1) * math.comb(problem.cluster.devices - 1, count - 1) for count in counts)


def _layouts(problem: Problem) -> Iterator[Layout]:
    """All layouts that are asked for."""
    devices, given = problem.cluster.devices, problem.job.replicas
    for count in _counts(problem):
        for bars in itertools.combinations(range(1, devices), count - 1) if given is None else [()]:
            replicas = given or tuple(right - left for left, right in itertools.pairwise((0, *bars, devices)))
            if max(replicas) <= problem.microbatches:
                for cuts in itertools.combinations(problem.costs.cut_positions, count - 1):
                    yield Layout(cuts, replicas)


def _starts(problem: Problem) -> Iterator[Layout]:
    """Layouts whose cuts are everywhere in the network; where replicas are free, as many as their stages need."""
    for count in _counts(problem):
        for cuts in _cuts(problem, count):
            layout = problem.filled(cuts) if problem.job.replicas is None else Layout(cuts, problem.job.replicas)
            if layout.devices == problem.cluster.devices:
                yield layout


def _on_whole_machines(problem: Problem) -> Iterator[Layout]:
    """Layouts with as many replicas of each stage, or with as many machines as each needs."""
    cluster = problem.cluster
    for count in _counts(problem):
        units = {cluster.devices // count, *(host.devices for host in cluster.hosts)}
        for cuts, unit in itertools.product(_cuts(problem, count), units):
            layout = problem.filled(cuts, unit)
            if layout.devices == cluster.devices:
                yield layout


def _cuts(problem: Problem, count: int) -> Iterator[tuple[int, ...]]:
    """As many cuts as may be for so many stages, far apart."""
    most = STARTS // len(_counts(problem))
    places = next(places for places in itertools.count(most, -1) if math.comb(places, count - 1) <= most)
    return itertools.combinations(thin(problem.costs, places), count - 1)


def thin(costs: GraphCosts, most: int) -> list[int]:
    """At most so many cut positions.

    Of the whole an eighth are those before the nodes with most parameters, the others of each slice of the compute time
    the one that sends least.
    """
    if len(costs.cut_positions) <= most:
        return list(costs.cut_positions)
    heavy = sorted(costs.cut_positions, key=lambda position: -costs.nodes[position].parameter_bytes)[: most // 8]
    time = list(itertools.accumulate((node.forward + node.backward for node in costs.nodes), initial=0.0))
    cheapest: dict[int, int] = {}
    for position in costs.cut_positions:
        part = min(int(time[position] / max(time[-1], 1e-12) * (most - len(heavy))), most - len(heavy) - 1)
        if part not in cheapest or costs.sent_bytes[position] < costs.sent_bytes[cheapest[part]]:
            cheapest[part] = position
    return sorted({*cheapest.values(), *heavy})


def _neighbours(layout: Layout, problem: Problem) -> Iterator[Layout]:
    """Layouts with a run of cuts moved by some places, pushing others ahead, with replicas moved, or a stage more."""
    positions = problem.costs.cut_positions
    places = [bisect.bisect_left(positions, cut) for cut in layout.cuts]
    runs = itertools.combinations(range(len(places) + 1), 2)
    for (first, last), step in itertools.product(runs, MOVES):
        if last - first <= TOGETHER:
            moved = [place + step if first <= number < last else place for number, place in enumerate(places)]
            for number in range(last, len(moved)) if step > 0 else ():
                moved[number] = max(moved[number], moved[number - 1] + 1)
            for number in range(first - 1, -1, -1) if step < 0 else ():
                moved[number] = min(moved[number], moved[number + 1] - 1)
            if moved[0] >= 0 and moved[-1] < len(positions):
                yield Layout(tuple(positions[place] for place in moved), layout.replicas)
    if problem.job.replicas is not None:
        return
    for giver, taker in itertools.permutations(range(len(layout.replicas)), 2):
        replicas = list(layout.replicas)
        replicas[giver], replicas[taker] = replicas[taker], replicas[giver]
        yield Layout(layout.cuts, tuple(replicas))
        for count in (1, 2, 4, 8):  # Several at once reach the next machine.
            if layout.replicas[giver] > count and layout.replicas[taker] + count <= problem.microbatches:
                replicas = list(layout.replicas)
                replicas[giver] -= count
                replicas[taker] += count
                yield Layout(layout.cuts, tuple(replicas))
    if problem.job.stages is None:
        yield from _with_a_stage_split(layout, problem)


def _with_a_stage_split(layout: Layout, problem: Problem) -> Iterator[Layout]:
    """Layouts with a stage cut in two, at up to four places, and its replicas divided."""
    for stage, (start, end, count) in enumerate(problem.stages(layout)):
        places = [cut for cut in problem.costs.cut_positions if start < cut < end]
        for cut in places[len(places) // 8 :: max(1, len(places) // 4)]:
            for first in range(1, count, 1 + count // SMALL):
                replicas = (*layout.replicas[:stage], first, count - first, *layout.replicas[stage + 1 :])
                yield Layout(tuple(sorted((*layout.cuts, cut))), replicas)
