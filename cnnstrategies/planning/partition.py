"""Choose where to cut a network and how often to replicate each stage, from the costs of its nodes.

The dynamic program of :mod:`cnnstrategies.planning.propose` proposes layouts; the simulator ranks them, and a
local search moves cuts and replicas while the predicted time falls.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.problem import Problem
from cnnstrategies.planning.propose import SLACK, SMALL, propose

PROPOSALS = 24  # that the simulator ranks
REFINED = 10  # of the ranked, each with other replicas, that the local search starts from
STEPS = 50  # of a local search at most
LIKELY = 12  # of some layouts for a large cluster that are simulated
MOST = 60  # simulations for a large cluster
ALL = 300  # layouts, where replicas are given: so few are all looked at
MOVES = (-8, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 8)  # of cuts in the local search, in places to cut


def best_layout(
    problem: Problem,
    predict: Callable[[Layout], float],
    bound: Callable[[Layout], float],
    stages: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Layout | None:
    """The layout with the least predicted step time that was found.

    Args:
        problem: Costs, limits and devices.
        predict: Step time of a layout in seconds, infinite where it does not fit into memory.
        bound: What it is not below; a layout whose bound is above the best time is not predicted.
        stages: Number of stages; chosen when left out.
        replicas: Replicas of each stage; chosen when left out.

    Returns:
        The layout, or None where none fits into memory or the network has too few places to cut.
    """
    search = _Search(problem, predict, bound)
    proposals = sorted(propose(problem, stages, replicas).items(), key=lambda item: item[1])
    if stages is None and replicas is None and problem.request.microbatches >= problem.cluster.devices:
        search.look_at([Layout((), (problem.cluster.devices,))])
    for first in range(0, PROPOSALS, LIKELY):
        search.look_at(layout for layout, _ in proposals[first : first + LIKELY])
    positions = problem.costs.cut_positions
    if replicas is not None and math.comb(len(positions), len(replicas) - 1) <= ALL:
        search.look_at(Layout(cuts, tuple(replicas)) for cuts in itertools.combinations(positions, len(replicas) - 1))
    if stages is None and replicas is None:
        search.look_at(_on_two_machines(problem))
    if replicas is None:
        search.look_at(other for layout in search.best(REFINED) for other in _with_two_stages_swapped(layout))
        if stages is None:
            search.look_at(other for layout in search.best(REFINED) for other in _with_a_stage_split(layout, problem))
    starts: dict[tuple[int, ...], Layout] = {}
    for layout in search.best(len(search.times)):
        starts.setdefault(layout.replicas, layout)
    for start in itertools.islice(starts.values(), REFINED):
        search.descend(start, problem.request.microbatches if replicas is None else 0)
    if replicas is None and not search.is_large:
        # With other replicas the best cuts may be far off.
        for start in search.best(2):
            moved = {one for one in search.neighbours(start) if one.replicas != start.replicas}
            search.look_at(other for one in moved for other in search.neighbours(one))
    if search.shortest == math.inf:
        return None
    return min(search.times, key=search.times.__getitem__)


class _Search:
    """The layouts that have been predicted, and which others are worth it."""

    def __init__(self, problem: Problem, predict: Callable[[Layout], float], bound: Callable[[Layout], float]) -> None:
        self.is_large = problem.cluster.devices > SMALL
        self.problem = problem
        self.predict = predict
        self.bound = bound
        self.times: dict[Layout, float] = {}
        self.shortest = math.inf

    def best(self, count: int) -> list[Layout]:
        """The quickest that are known."""
        ranked = sorted(self.times, key=lambda layout: (self.times[layout], layout.cuts, layout.replicas))
        return ranked[:count]

    def look_at(self, layouts: Iterable[Layout]) -> None:
        """Predict the layouts, the likeliest first, but those that cannot be better than the best."""
        every = self.problem.cluster.devices
        new = {layout for layout in layouts if layout not in self.times and layout.devices == every}
        if self.is_large:
            # Each prediction takes long: only those that the model likes.
            liked = heapq.nsmallest(LIKELY, ((self.problem.model(one), one.cuts, one.replicas, one) for one in new))
            new = {layout for model, _, _, layout in liked if model < SLACK * self.shortest}
        for bound, layout in sorted(((self.bound(layout), layout) for layout in new), key=lambda pair: pair[0]):
            if bound > 1.02 * self.shortest or (self.is_large and len(self.times) >= MOST):
                return
            self.times[layout] = self.predict(layout)
            self.shortest = min(self.shortest, self.times[layout])

    def neighbours(self, layout: Layout, most_replicas: int | None = None) -> set[Layout]:
        """Layouts that differ little."""
        most = self.problem.request.microbatches if most_replicas is None else most_replicas
        return set(_neighbours(layout, self.problem.costs.cut_positions, most))

    def descend(self, start: Layout, most_replicas: int) -> None:
        """Move to the best neighbour while that is faster."""
        here = start
        for _ in range(STEPS):
            neighbours = self.neighbours(here, most_replicas)
            self.look_at(neighbours)
            best = min((one for one in neighbours if one in self.times), key=self.times.__getitem__, default=here)
            if self.times[best] >= self.times[here]:
                return
            here = best


def _neighbours(layout: Layout, positions: Sequence[int], most_replicas: int) -> Iterator[Layout]:
    """Layouts with a run of cuts moved by some places, pushing others ahead, or with replicas moved."""
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
        for count in (1, 2, 4, 8):  # Several at once reach the next machine.
            if layout.replicas[giver] > count and layout.replicas[taker] + count <= most_replicas:
                replicas = list(layout.replicas)
                replicas[giver] -= count
                replicas[taker] += count
                yield Layout(layout.cuts, tuple(replicas))


def _with_a_stage_split(layout: Layout, problem: Problem) -> Iterator[Layout]:
    """Layouts with a stage cut in two, at up to four places, and its replicas divided."""
    bounds = (0, *layout.cuts, len(problem.costs.nodes))
    for stage, count in enumerate(layout.replicas):
        places = [cut for cut in problem.costs.cut_positions if bounds[stage] < cut < bounds[stage + 1]]
        for cut in places[len(places) // 8 :: max(1, len(places) // 4)]:
            for first in range(1, count, 1 + count // SMALL):
                replicas = (*layout.replicas[:stage], first, count - first, *layout.replicas[stage + 1 :])
                yield Layout(tuple(sorted((*layout.cuts, cut))), replicas)


def _on_two_machines(problem: Problem) -> Iterator[Layout]:
    """A stage on each of two machines."""
    counts = tuple(host.devices for host in problem.cluster.hosts)
    if len(counts) == 2 and max(counts) <= problem.request.microbatches:
        for cut in problem.costs.cut_positions:
            yield Layout((cut,), counts)


def _with_two_stages_swapped(layout: Layout) -> Iterator[Layout]:
    for left, right in itertools.combinations(range(len(layout.replicas)), 2):
        replicas = list(layout.replicas)
        replicas[left], replicas[right] = replicas[right], replicas[left]
        yield Layout(layout.cuts, tuple(replicas))
