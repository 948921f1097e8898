"""A timetable for tests of the planner: each stage's replicas take turns, 1f1b with PipeDream's depth."""

from collections.abc import Sequence

from cnnstrategies.pipeline.simulate import Task


def tasks_of(replicas: Sequence[int], microbatches: int, schedule: str) -> list[list[Task]]:
    ranks = []
    for stage, count in enumerate(replicas):
        for replica in range(count):
            own = range(replica, microbatches, count)
            depth = -(-sum(replicas[stage:]) // count) if schedule == "1f1b" else len(own)
            order = [Task("forward", stage, m) for m in own[:depth]]
            for index, m in enumerate(own):
                order.append(Task("backward", stage, m))
                order.extend(Task("forward", stage, later) for later in own[depth + index : depth + index + 1])
            ranks.append(order)
    return ranks
