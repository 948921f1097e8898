"""Draws the timetables of docs/pipeline.md: python docs/images/timetables.py."""

from pathlib import Path

from cnnstrategies.pipeline.timeline import draw_timeline
from cnnstrategies.pipeline.timetable import Placement, Schedule, timetable
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import StageCost, StageMessage

LINK = Link(bandwidth=1e9, latency=0.0)


def stage(forward: float, backward: float, parameters: int = 0) -> StageCost:
    """A stage; times in seconds for one microbatch."""
    return StageCost(1, forward, backward, parameters, 0, 0, ((backward, parameters),))


def draw(name: str, replicas: list[int], stages: list[StageCost], microbatches: int, schedule: Schedule) -> None:
    """Simulate a step and draw it."""
    messages = {(index, index + 1): StageMessage(40_000, 40_000) for index in range(len(stages) - 1)}
    result = simulate(timetable(replicas, microbatches, schedule), stages, messages, LINK)
    placement = Placement(tuple(replicas))
    names = {rank: placement.describe(rank) for rank in range(sum(replicas))}
    title = f"{schedule}, replicas {replicas}, {microbatches} microbatches"
    draw_timeline(result.spans, Path(__file__).with_name(f"{name}.png"), title, names)


def main() -> None:
    """Draw all."""
    equal = [stage(0.001, 0.002) for _ in range(4)]
    draw("timetable_1f1b", [1, 1, 1, 1], equal, 8, "1f1b")
    draw("timetable_hybrid", [3, 1], [stage(0.003, 0.006, 400_000), stage(0.001, 0.002)], 12, "1f1b")


if __name__ == "__main__":
    main()
