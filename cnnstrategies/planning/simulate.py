"""Predict a step's time and timeline from each rank's list of actions and the costs of the stages."""

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cnnstrategies.pipeline.gradients import BUCKET_BYTES
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Kind, Task
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.stage_costs import Message, StageCost


@dataclass(frozen=True)
class Simulation:
    """A predicted step.

    Attributes:
        step_time: Seconds from the first forward to the last reduced gradient.
        spans: What every rank does.
    """

    step_time: float
    spans: list[Span]


def simulate(
    tasks: Sequence[Sequence[Task]],
    stages: Sequence[StageCost],
    messages: Mapping[tuple[int, int], Message],
    link: Link,
    bucket_bytes: int = BUCKET_BYTES,
) -> Simulation:
    """Run a timetable on paper.

    A task starts when its rank is free and its inputs have arrived. A message leaves when the task that
    makes it ends and the sender's outgoing and the receiver's incoming port are free; it overlaps with
    computation. The replicas of a stage reduce their gradients in buckets while their last backward runs;
    the last bucket leaves when it ends.

    Args:
        tasks: For each rank its computations in order.
        stages: Costs of each stage for one microbatch.
        messages: What passes between stages for one microbatch, by (sending stage, receiving stage).
        link: The connection between any two ranks.
        bucket_bytes: Gradients that are reduced at once.

    Raises:
        ValueError: The timetable cannot be carried out: some tasks wait for each other.
    """
    return _Run(tasks, stages, messages, link).run(bucket_bytes)


def peak_in_flight(tasks: Sequence[Task]) -> dict[int, int]:
    """The most microbatches whose activations a rank holds at once, for each stage that it runs."""
    held: Counter[int] = Counter()
    peak: dict[int, int] = {}
    for task in tasks:
        held[task.stage] += 1 if task.kind == "forward" else -1
        peak[task.stage] = max(peak.get(task.stage, 0), held[task.stage])
    return peak


class _Run:
    """The state of one simulation: a queue of events in order of time."""

    def __init__(
        self,
        tasks: Sequence[Sequence[Task]],
        stages: Sequence[StageCost],
        messages: Mapping[tuple[int, int], Message],
        link: Link,
    ) -> None:
        self.tasks = tasks
        self.stages = stages
        self.link = link
        self.rank_of = {task: rank for rank, own in enumerate(tasks) for task in own}
        self.forward_targets: dict[int, list[tuple[int, int]]] = {}
        self.backward_targets: dict[int, list[tuple[int, int]]] = {}
        self.inputs: Counter[tuple[Kind, int]] = Counter()
        # Sorted, so that the next stage is served before those behind it.
        for (source, target), message in sorted(messages.items(), key=lambda item: item[0]):
            self.forward_targets.setdefault(source, []).append((target, message.bytes))
            self.inputs["forward", target] += 1
            if message.gradient_bytes:
                self.backward_targets.setdefault(target, []).append((source, message.gradient_bytes))
                self.inputs["backward", source] += 1
        self.missing = {task: self.inputs[task.kind, task.stage] for task in self.rank_of}
        self.next = [0] * len(tasks)
        self.free = [0.0] * len(tasks)
        self.outgoing = [0.0] * len(tasks)
        self.incoming = [0.0] * len(tasks)
        self.queue: list[tuple[float, int, Task, bool]] = []
        self.counter = itertools.count()
        self.spans: list[Span] = []

    def run(self, bucket_bytes: int) -> Simulation:
        for rank in range(len(self.tasks)):
            self._start_next(rank, 0.0)
        while self.queue:
            now, _, task, is_end = heapq.heappop(self.queue)
            rank = self.rank_of[task]
            if is_end:
                self.next[rank] += 1
                self._send(task, now)
            else:
                self.missing[task] -= 1
            self._start_next(rank, now)
        for rank, own in enumerate(self.tasks):
            if self.next[rank] < len(own):
                raise ValueError(
                    f"rank {rank} waits for ever for the inputs of {own[self.next[rank]]}: "
                    "the timetable's orders contradict each other"
                )
        self._reduce(bucket_bytes)
        return Simulation(max((span.end for span in self.spans), default=0.0), self.spans)

    def _start_next(self, rank: int, now: float) -> None:
        if self.free[rank] > now or self.next[rank] >= len(self.tasks[rank]):
            return
        task = self.tasks[rank][self.next[rank]]
        if self.missing[task]:
            return
        stage = self.stages[task.stage]
        end = now + (stage.forward if task.kind == "forward" else stage.backward)
        self.free[rank] = end
        self.missing[task] = -1
        self.spans.append(Span(rank, task.kind, task.stage, task.microbatch, now, end))
        heapq.heappush(self.queue, (end, next(self.counter), task, True))

    def _send(self, task: Task, now: float) -> None:
        source = self.rank_of[task]
        targets = self.forward_targets if task.kind == "forward" else self.backward_targets
        for stage, size in targets.get(task.stage, ()):
            receiver = Task(task.kind, stage, task.microbatch)
            target = self.rank_of[receiver]
            arrival = now
            if target != source:
                start = max(now, self.outgoing[source], self.incoming[target])
                self.outgoing[source] = self.incoming[target] = start + size / self.link.bandwidth
                arrival = start + self.link.time(size)
                self.spans.append(Span(source, "send", task.stage, task.microbatch, start, arrival))
            heapq.heappush(self.queue, (arrival, next(self.counter), receiver, False))

    def _reduce(self, bucket_bytes: int) -> None:
        last: dict[tuple[int, int], Span] = {}
        for span in self.spans:
            if span.kind == "backward":
                last[span.stage, span.rank] = span
        for stage, cost in enumerate(self.stages):
            members = {rank: span for (of, rank), span in last.items() if of == stage}
            if len(members) < 2 or not cost.parameter_bytes:
                continue
            start = max(span.start for span in members.values())
            total = self.link.all_reduce_time(cost.parameter_bytes, len(members))
            bucket = self.link.all_reduce_time(min(bucket_bytes, cost.parameter_bytes), len(members))
            end = max(start + total, max(span.end for span in members.values()) + bucket)
            self.spans.extend(Span(rank, "reduce", stage, None, start, end) for rank in members)
