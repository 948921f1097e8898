"""Choose where to cut a network and how often to replicate each stage, from the costs of its nodes.

The dynamic programme of :mod:`cnnstrategies.planning.programme` proposes layouts; the simulator ranks them, and a
local search moves cuts and replicas while the predicted time falls.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.programme import Problem, propose

PROPOSALS = 24  # that the simulator ranks
REFINED = 6  # of the ranked, each with other replicas, that the local search starts from
MOVES = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)  # of cuts in the local search, in places to cut


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
        if stages is None:
            split = {other for layout in ranked[:REFINED] for other in _with_a_stage_split(layout, problem)}
            ranked = sorted({*ranked, *split}, key=lambda layout: (time_of(layout), layout.cuts, layout.replicas))
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


def _with_a_stage_split(layout: Layout, problem: Problem) -> Iterator[Layout]:
    """Layouts with a replicated stage cut in two, at up to four places."""
    bounds = (0, *layout.cuts, len(problem.costs.nodes))
    for stage, count in enumerate(layout.replicas):
        places = [cut for cut in problem.costs.cut_positions if bounds[stage] < cut < bounds[stage + 1]]
        for cut in places[len(places) // 8 :: max(1, len(places) // 4)]:
            for first in range(1, count):
                replicas = (*layout.replicas[:stage], first, count - first, *layout.replicas[stage + 1 :])
                yield Layout(tuple(sorted((*layout.cuts, cut))), replicas)


def _with_two_stages_swapped(layout: Layout) -> Iterator[Layout]:
    for left, right in itertools.combinations(range(len(layout.replicas)), 2):
        replicas = list(layout.replicas)
        replicas[left], replicas[right] = replicas[right], replicas[left]
        yield Layout(layout.cuts, tuple(replicas))
