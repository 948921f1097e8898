"""Which ranks send each other activations, and in which order they connect."""

import math
from collections.abc import Iterable

from cnnstrategies.pipeline.stage import Division
from cnnstrategies.pipeline.timetable import Placement

Edge = tuple[int, int]


def neighbours(divisions: Iterable[Division], placement: Placement, microbatches: int) -> set[Edge]:
    """The pairs of ranks between which something is sent in a step, as (earlier stage's rank, later stage's rank).

    Args:
        divisions: Those of all modes.
        placement: The numbering of the ranks.
        microbatches: Microbatches of a step.
    """
    stages = {(route.source, target) for one in divisions for route in one.routes for target in route.targets}
    if placement.stages > 1:
        stages.add((0, placement.stages - 1))  # Targets.
    pairs = set()
    for source, target in stages:
        senders, receivers = placement.ranks(source), placement.ranks(target)
        for m in range(min(microbatches, math.lcm(len(senders), len(receivers)))):
            pairs.add((senders[m % len(senders)], receivers[m % len(receivers)]))
    return pairs


def connection_rounds(pairs: Iterable[Edge]) -> list[list[Edge]]:
    """Divide the directed edges, both of each pair, into rounds in which no rank occurs twice.

    If each rank connects its edges in the order of the rounds, none waits for ever: in the first round that is not done
    both ends of an edge have come to it.

    Args:
        pairs: Pairs of ranks.

    Returns:
        For each round its edges, as (sender, receiver). A pair's way back follows its way there.
    """
    taken: dict[int, int] = {}  # For each rank a bit for each round that it is busy in.
    rounds: list[list[Edge]] = []
    for first, second in sorted(pairs):
        free = ~(taken.get(first, 0) | taken.get(second, 0))
        bit = free & -free
        for rank in (first, second):
            taken[rank] = taken.get(rank, 0) | bit
        index = 2 * (bit.bit_length() - 1)
        while len(rounds) < index + 2:
            rounds.append([])
        rounds[index].append((first, second))
        rounds[index + 1].append((second, first))
    return rounds
