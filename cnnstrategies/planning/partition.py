"""Choose the layout of a pipeline (its cuts, and the replicas of each stage) from the costs of the nodes.

If only a few layouts are possible, all of them are considered. Otherwise the search has three phases:

1. Local searches start from layouts that differ much from each other. They compare layouts by the step time that the
   formula of `problem.py` predicts.
2. The most promising results are simulated.
3. Local searches start from the best simulated layouts. They compare layouts by the simulated step time.
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

ALL_LAYOUTS = 800  # If at most this number of layouts is possible, all layouts are considered.
# Local searches start from the best of many sets of cuts. This is the largest number of sets that are compared, divided
# equally among the numbers of stages that are tried.
MOST_STARTS = 6400
# Largest number of possible layouts of which all are considered if the local searches find none that fits into memory.
MOST_FOR_MEMORY = 20000
STAGES = 16  # Largest number of stages that is tried if the user does not set the number.
PROPOSALS = 24  # Number of layouts that are simulated because they are the best by the formula of `problem.py`.
SEARCHES = 12  # Number of layouts from which a local search by the formula of `problem.py` starts.
MOST_MOVED_CUTS = 3  # Largest number of cuts that a local search moves at once.
STEPS = 50  # Largest number of moves that one local search makes.
SMALL = 8  # Largest number of devices for which every layout that may be the best is simulated.
# With more than `SMALL` devices: largest number of layouts that one step of a local search simulates.
SIMULATED_PER_STEP = 12
MOST_SIMULATED = 60  # With more than `SMALL` devices: largest number of simulations in total.
# With more than `SMALL` devices, a layout is only simulated if its step time by the formula of `problem.py` is less
# than this multiple of the best simulated step time. The factor is larger than 1 because the formula is less accurate
# than the simulator.
SLACK = 1.2
# Distances by which a local search shifts cuts, in cut positions: -1 shifts a cut to the previous possible position.
MOVES = (-8, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 8)

# Cost of a layout: first the number of bytes by which the layout exceeds the memory limit, then the seconds of a step.
Cost = tuple[float, float]


def best_layout(problem: Problem, cost: Callable[[Layout], Cost], model: Callable[[Layout], Cost]) -> Layout | None:
    """Search for the layout with the least cost.

    Args:
        problem: Network, cluster and constraints.
        cost: Function that simulates a layout and returns its cost.
        model: Function that returns the cost of a layout by the formula of `problem.py`, without a simulation.

    Returns:
        The best layout that the search visited; None if the network has too few cut positions.
    """
    search = _Search(problem, cost, functools.cache(model))
    if not search.is_large and _number_of_layouts(problem) <= ALL_LAYOUTS:
        layouts = list(_layouts(problem))
        search.simulate_promising(search.best_by_model(layouts, PROPOSALS))
        search.simulate_promising(layouts)
    else:
        free = problem.job.replicas is None
        starts = search.dissimilar(
            search.best_by_model(_starts(problem), MOST_STARTS), SEARCHES // 2 if free else SEARCHES
        )
        if free:
            # The formula underestimates the cost of a stage that occupies parts of two machines. Therefore searches
            # also start from layouts whose stages fill whole machines.
            starts += search.dissimilar(search.best_by_model(_filling_machines(problem), MOST_STARTS), SEARCHES // 2)
        ends = [search.local_search(start, search.by_model) for start in starts]
        search.simulate_promising(search.best_by_model({*starts, *ends}, PROPOSALS))
        for start in search.dissimilar(sorted(search.costs, key=search.costs.__getitem__), SEARCHES // 2):
            search.local_search(start, search.by_simulation)
        if search.least[0] > 0 and _number_of_layouts(problem) <= MOST_FOR_MEMORY:
            # If few layouts fit into memory, the searches may end at layouts that do not fit.
            search.simulate_promising(search.best_by_model(_layouts(problem), PROPOSALS))
    return min(search.costs, key=search.costs.__getitem__, default=None)


class _Search:
    """A search among layouts, with the costs of the layouts that have been simulated.

    Attributes:
        is_large: Whether the cluster has so many devices that not every promising layout can be simulated.
        costs: Costs of the simulated layouts.
        least: Least cost of the simulated layouts.
    """

    def __init__(self, problem: Problem, cost: Callable[[Layout], Cost], model: Callable[[Layout], Cost]) -> None:
        self.is_large = problem.cluster.devices > SMALL
        self.problem = problem
        self.cost = cost
        self.model = model
        self.costs: dict[Layout, Cost] = {}
        self.least: Cost = (math.inf, math.inf)

    def best_by_model(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Return the ``count`` layouts with the least costs by the formula of `problem.py`."""
        ranked = heapq.nsmallest(
            count, ((self.model(layout), layout.cuts, layout.replicas, layout) for layout in layouts)
        )
        return [layout for *_, layout in ranked]

    def dissimilar(self, layouts: Iterable[Layout], count: int) -> list[Layout]:
        """Choose the first ``count`` layouts that differ much from each other, in the order of ``layouts``.

        A layout is skipped if it is close to a chosen layout, because a local search from the chosen layout can reach
        the skipped layout. Two layouts are close if their stages have equal numbers of replicas, and if each cut of one
        layout is at most ``MOVES[-1]`` cut positions from the corresponding cut of the other layout.
        """
        positions_by_replicas: dict[tuple[int, ...], list[list[int]]] = {}
        chosen: list[Layout] = []
        for layout in layouts:
            places = [bisect.bisect_left(self.problem.costs.cut_positions, cut) for cut in layout.cuts]
            others = positions_by_replicas.setdefault(layout.replicas, [])
            if not others or all(
                max(map(abs, map(operator.sub, places, other)), default=0) > MOVES[-1] for other in others
            ):
                others.append(places)
                chosen.append(layout)
                if len(chosen) == count:
                    break
        return chosen

    def simulate_promising(self, layouts: Iterable[Layout]) -> None:
        """Simulate the layouts that may be better than the best layout simulated so far.

        Layouts are simulated in order of a lower bound of their step times, the smallest bound first.
        """
        new = {layout for layout in layouts if layout not in self.costs}
        if self.is_large:
            # With many devices a simulation takes long, so only the layouts with the smallest costs by the formula of
            # `problem.py` are simulated.
            excess, time = self.least
            new = {
                layout
                for layout in self.best_by_model(new, SIMULATED_PER_STEP)
                if self.model(layout) < (excess, SLACK * time)
            }
        for bound, layout in sorted(((self.problem.bound(layout), layout) for layout in new), key=lambda pair: pair[0]):
            if (0.0, bound) > self.least or (self.is_large and len(self.costs) >= MOST_SIMULATED):
                return
            self.costs[layout] = self.cost(layout)
            self.least = min(self.least, self.costs[layout])

    def by_model(self, layouts: set[Layout]) -> dict[Layout, Cost]:
        """Return the cost of each layout by the formula of `problem.py`, without a simulation."""
        return {layout: self.model(layout) for layout in layouts}

    def by_simulation(self, layouts: set[Layout]) -> dict[Layout, Cost]:
        """Simulate the promising layouts, and return the simulated cost of each layout.

        Layouts that are not promising are missing from the result, unless an earlier call has simulated them.
        """
        self.simulate_promising(layouts)
        return {layout: self.costs[layout] for layout in layouts if layout in self.costs}

    def local_search(self, start: Layout, price: Callable[[set[Layout]], dict[Layout, Cost]]) -> Layout:
        """Run a local search, and return the last layout that the search reaches.

        The search moves from a layout to the neighbour with the least cost, until no neighbour has a smaller cost than
        the current layout. It also ends after `STEPS` moves.

        Args:
            start: Layout from which the search starts.
            price: Function that returns the costs of layouts: :meth:`by_model` or :meth:`by_simulation`.
        """
        current = start
        for _ in range(STEPS):
            known = price({current, *_neighbours(current, self.problem)})
            best = min(known, key=known.__getitem__, default=current)
            if best == current or known[best] >= known[current]:
                break
            current = best
        return current


def _counts(problem: Problem) -> Sequence[int]:
    """Return the numbers of stages for which layouts are searched.

    A layout cannot have more stages than devices, or more cuts than the network has cut positions.
    """
    job, most = problem.job, min(problem.cluster.devices, len(problem.costs.cut_positions) + 1)
    if job.replicas is not None:
        wanted: Sequence[int] = [len(job.replicas)]
    else:
        wanted = range(1, STAGES + 1) if job.stages is None else [job.stages]
    return [count for count in wanted if count <= most]


def _number_of_layouts(problem: Problem) -> int:
    """Return the number of layouts that the job permits."""
    places, counts = len(problem.costs.cut_positions), _counts(problem)
    if problem.job.replicas is not None:
        return sum(math.comb(places, count - 1) for count in counts)
    return sum(math.comb(places, count - 1) * math.comb(problem.cluster.devices - 1, count - 1) for count in counts)


def _layouts(problem: Problem) -> Iterator[Layout]:
    """Yield all layouts that the job permits."""
    devices, replicas_of_job = problem.cluster.devices, problem.job.replicas
    for count in _counts(problem):
        for bars in itertools.combinations(range(1, devices), count - 1) if replicas_of_job is None else [()]:
            replicas = replicas_of_job or tuple(right - left for left, right in itertools.pairwise((0, *bars, devices)))
            if max(replicas) <= problem.microbatches:
                for cuts in itertools.combinations(problem.costs.cut_positions, count - 1):
                    yield Layout(cuts, replicas)


def _starts(problem: Problem) -> Iterator[Layout]:
    """Yield layouts from which a search can start, one for each set of cuts from :func:`_cuts`.

    If the job does not set the replicas, slower stages get more replicas. Layouts that would leave devices unused are
    left out.
    """
    for count in _counts(problem):
        for cuts in _cuts(problem, count):
            layout = problem.filled(cuts) if problem.job.replicas is None else Layout(cuts, problem.job.replicas)
            if layout.devices == problem.cluster.devices:
                yield layout


def _filling_machines(problem: Problem) -> Iterator[Layout]:
    """Yield layouts whose stages have equal numbers of replicas, and layouts whose stages fill whole machines."""
    cluster = problem.cluster
    for count in _counts(problem):
        units = {cluster.devices // count, *(host.devices for host in cluster.hosts)}
        for cuts, unit in itertools.product(_cuts(problem, count), units):
            layout = problem.filled(cuts, unit)
            if layout.devices == cluster.devices:
                yield layout


def _cuts(problem: Problem, count: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of cuts for ``count`` stages.

    Only the most useful cut positions are used, so that the number of sets stays below ``MOST_STARTS``.
    """
    most = MOST_STARTS // len(_counts(problem))
    places = next(places for places in itertools.count(most, -1) if math.comb(places, count - 1) <= most)
    return itertools.combinations(thin(problem.costs, places), count - 1)


def thin(costs: GraphCosts, most: int) -> list[int]:
    """Choose the most useful cut positions of a network, at most ``most``.

    An eighth of the chosen positions are directly before the nodes with the most parameters. For the other positions,
    the network is divided into sections of equal compute time. In each section, the position where a cut sends the
    fewest bytes is chosen.
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
    """Yield the layouts that the local search can reach from a layout with one move.

    There are four kinds of moves:

    - Shift up to ``MOST_MOVED_CUTS`` consecutive cuts by the same number of positions, and push on any cuts that are in
      their way.
    - Exchange the numbers of replicas of two stages.
    - Move replicas from one stage to another.
    - Split a stage in two.

    If the job sets the replicas, only the first kind is used. If the job sets the number of stages, no stage is split.
    """
    positions = problem.costs.cut_positions
    places = [bisect.bisect_left(positions, cut) for cut in layout.cuts]
    runs = itertools.combinations(range(len(places) + 1), 2)
    for (first, last), step in itertools.product(runs, MOVES):
        if last - first <= MOST_MOVED_CUTS:
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
        for count in (1, 2, 4, 8):  # Moving several replicas at once can make a stage fill whole machines.
            if layout.replicas[giver] > count and layout.replicas[taker] + count <= problem.microbatches:
                replicas = list(layout.replicas)
                replicas[giver] -= count
                replicas[taker] += count
                yield Layout(layout.cuts, tuple(replicas))
    if problem.job.stages is None:
        yield from _with_split_stage(layout, problem)


def _with_split_stage(layout: Layout, problem: Problem) -> Iterator[Layout]:
    """Yield layouts in which one stage is split in two.

    For each stage, up to seven positions of the new cut are tried. For each position, several divisions of the stage's
    replicas among the two new stages are tried.
    """
    for stage, (start, end, _, count, _) in enumerate(problem.sections(layout)):
        places = [cut for cut in problem.costs.cut_positions if start < cut < end]
        for cut in places[len(places) // 8 :: max(1, len(places) // 4)]:
            for first in range(1, count, 1 + count // SMALL):
                replicas = (*layout.replicas[:stage], first, count - first, *layout.replicas[stage + 1 :])
                yield Layout(tuple(sorted((*layout.cuts, cut))), replicas)
