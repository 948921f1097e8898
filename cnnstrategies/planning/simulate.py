"""Predict the time and the timeline of a step from the ranks' lists of tasks and the costs of the stages."""

import heapq
from collections.abc import Mapping, Sequence
from functools import cached_property

from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Task
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, StageCost, StageMessage, all_gather, all_reduce, reduced_at

# A tuple with the fields of a `Span`: rank, kind, stage, microbatch, start and end.
Record = tuple[int, str, int, int | None, float, float]


class Simulation:
    """The result of simulating a step.

    Attributes:
        step_time: Seconds from the start of the first forward until all computations, transfers and reductions have
            ended.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records
        self.step_time = max((record[5] for record in records), default=0.0)

    @cached_property
    def spans(self) -> list[Span]:
        """Spans of all ranks' computations, transfers and reductions."""
        return [Span(*record) for record in self._records]


def simulate(
    tasks: Sequence[Sequence[Task]],
    stages: Sequence[StageCost],
    messages: Mapping[tuple[int, int], StageMessage],
    network: Link | Cluster,
    bucket_bytes: int = BUCKET_BYTES,
) -> Simulation:
    """Simulate a step that follows a timetable.

    A task starts when its rank is free and the task's inputs have arrived. The computing time that a rank spends on a
    message is added to the task that sends or receives the message. A message leaves when the sending task has ended
    and when the sender's outgoing port and the receiver's incoming port are free. Every device has one port in each
    direction for messages inside its machine, and every machine has one port in each direction for messages to other
    machines. Messages overlap with computation. The replicas of a stage reduce their gradients bucket by bucket during
    their last backward, as soon as the gradients of a bucket are ready. Before the first bucket they exchange the
    means and variances of batch normalisation. At the end, the replicas of the last stage exchange the network's
    results, so that each can compute the loss of the whole batch.

    Args:
        tasks: Each rank's tasks, in the order in which the rank runs them.
        stages: Costs of the stages for one microbatch.
        messages: Messages between the stages. Keys are pairs of the sending and the receiving stage.
        network: The cluster, with one device for each rank; or a single connection if all pairs of ranks have equal
            connections.
        bucket_bytes: Size of a gradient bucket in bytes.

    Raises:
        ValueError: Some tasks wait for each other forever.
    """
    cluster = network if isinstance(network, Cluster) else Cluster.flat(max(1, len(tasks)), network)
    run = _Run(tasks, stages, messages, cluster)
    run.run()
    run.reduce(bucket_bytes)
    return Simulation(run.records)


class _Run:
    """The state of one discrete-event simulation. The events are ends of tasks and arrivals of messages.

    For speed, a task is represented by the number ``line * count + microbatch``. ``count`` is the number of
    microbatches. ``line`` is ``2 * stage`` for the forward passes of a stage, and ``2 * stage + 1`` for its backward
    passes.

    Attributes:
        order: Each rank's tasks, in the order in which the rank runs them.
        rank_of: Ranks that run the tasks. Keys are tasks.
        targets: The messages of each line's tasks. For each message: the line that receives it, and its size in bytes.
        missing: Number of inputs that have not arrived; -1 after the task has started. Keys are tasks.
        times: ``times[rank][line]`` is the computing time of a task in seconds, without the time for messages.
        peers: For each line, the lines that send messages to it or receive messages from it.
        works: Whether sending or receiving a message takes computing time.
        routes: Keys are pairs of a sending and a receiving rank. Values are the sender's outgoing port, the receiver's
            incoming port, and the connection. An entry is added before the first message of the pair.
        records: Computations, transfers and reductions of the simulated step.
    """

    def __init__(
        self,
        tasks: Sequence[Sequence[Task]],
        stages: Sequence[StageCost],
        messages: Mapping[tuple[int, int], StageMessage],
        cluster: Cluster,
    ) -> None:
        self.tasks = tasks
        self.stages = stages
        self.cluster = cluster
        self.count = count = 1 + max((task.microbatch for rank_tasks in tasks for task in rank_tasks), default=0)
        self.order = [
            [((task.stage * 2) + (task.kind == "backward")) * count + task.microbatch for task in rank_tasks]
            for rank_tasks in tasks
        ]
        self.rank_of = {task: rank for rank, rank_tasks in enumerate(self.order) for task in rank_tasks}
        lines = 2 * len(stages)
        self.targets: list[list[tuple[int, int]]] = [[] for _ in range(lines)]
        missing = [0] * lines
        # The messages are sorted by stages. A forward therefore sends to the nearest stage first, and a backward sends
        # to the stage with the smallest number first.
        for (source, target), message in sorted(messages.items(), key=lambda item: item[0]):
            self.targets[2 * source].append((2 * target, message.bytes))
            missing[2 * target] += 1
            if message.gradient_bytes:
                self.targets[2 * target + 1].append((2 * source + 1, message.gradient_bytes))
                missing[2 * source + 1] += 1
        self.missing = {task: missing[task // count] for task in self.rank_of}
        self.times = [
            [(stage.backward if backward else stage.forward) / speed for stage in stages for backward in (False, True)]
            for speed in cluster.speeds[: len(tasks)]
        ]
        self.peers: list[list[int]] = [[] for _ in range(lines)]
        for line, targets in enumerate(self.targets):
            for target, _ in targets:
                self.peers[line].append(target)
                self.peers[target].append(line)
        self.works = any(link.work for host in cluster.hosts for link in (host.inside, host.interconnect))
        self.routes: dict[tuple[int, int], tuple[int, int, Link]] = {}
        self.records: list[Record] = []

    def run(self) -> None:
        """Simulate the forward passes, backward passes and messages of the step."""
        count, order, rank_of, missing, records = self.count, self.order, self.rank_of, self.missing, self.records
        position = [0] * len(order)
        free = [0.0] * len(order)
        ports = [0.0] * (2 * (len(order) + len(self.cluster.hosts)))
        queue: list[tuple[float, int, int, bool]] = []
        sequence = 0

        def start(rank: int, now: float) -> None:
            nonlocal sequence
            if free[rank] > now or position[rank] >= len(order[rank]):
                return
            task = order[rank][position[rank]]
            if missing[task]:
                return
            line, microbatch = divmod(task, count)
            free[rank] = end = (
                now + self.times[rank][line] + (self._work(rank, line, microbatch) if self.works else 0.0)
            )
            missing[task] = -1
            records.append((rank, "backward" if line % 2 else "forward", line // 2, microbatch, now, end))
            heapq.heappush(queue, (end, sequence, task, True))
            sequence += 1

        for rank in range(len(order)):
            start(rank, 0.0)
        while queue:
            now, _, task, is_end = heapq.heappop(queue)
            rank = rank_of[task]
            if not is_end:
                missing[task] -= 1
                start(rank, now)
                continue
            position[rank] += 1
            line, microbatch = divmod(task, count)
            for target_line, size in self.targets[line]:
                receiver = target_line * count + microbatch
                target = rank_of[receiver]
                arrival = now
                if target != rank:
                    route = self.routes.get((rank, target)) or self._route(rank, target)
                    outgoing, incoming, link = route
                    leaves = max(now, ports[outgoing], ports[incoming])
                    ports[outgoing] = ports[incoming] = leaves + size / link.bandwidth
                    arrival = leaves + link.time(size)
                    records.append((rank, "send", line // 2, microbatch, leaves, arrival))
                heapq.heappush(queue, (arrival, sequence, receiver, False))
                sequence += 1
            start(rank, now)
        for rank, rank_tasks in enumerate(self.tasks):
            if position[rank] < len(rank_tasks):
                raise ValueError(
                    f"rank {rank} waits forever for the inputs of {rank_tasks[position[rank]]}: "
                    "the tasks of the ranks are in orders that contradict each other"
                )

    def reduce(self, bucket_bytes: int) -> None:
        """Simulate the reduction of each stage's gradients over the replicas, and add the reductions to the records."""
        last: dict[tuple[int, int], Record] = {}
        for record in self.records:
            if record[1] == "backward":
                last[record[2], record[0]] = record
        for stage, cost in enumerate(self.stages):
            members = {rank: record for (stage_of_record, rank), record in last.items() if stage_of_record == stage}
            if not members or not cost.parameter_bytes:
                continue
            time = all_reduce(self.cluster, min(members), len(members))
            gather = all_gather(self.cluster, min(members), len(members))
            statistics, results = gather(cost.statistics_bytes), gather(cost.result_bytes * self.count / len(members))
            start = max(record[4] for record in members.values())
            backward = max(record[5] for record in members.values()) - start
            end = start + reduced_at(cost.buckets(bucket_bytes, backward), backward, time, statistics) + results
            if len(members) > 1 or end > start + backward:
                self.records.extend((rank, "reduce", stage, None, start, end) for rank in members)

    def _work(self, rank: int, line: int, microbatch: int) -> float:
        """Return the computing time in seconds that a rank spends on sending and receiving the messages of a task.

        Args:
            rank: The rank that runs the task.
            line: Line of the task: ``2 * stage`` for a forward, and ``2 * stage + 1`` for a backward.
            microbatch: Microbatch of the task.
        """
        others = (self.rank_of[peer * self.count + microbatch] for peer in self.peers[line])
        return sum(self.cluster.link(rank, other).work for other in others if other != rank)

    def _route(self, source: int, target: int) -> tuple[int, int, Link]:
        """Return the sender's outgoing port, the receiver's incoming port, and the connection between the two ranks."""
        hosts = self.cluster.host_of
        ends = (source, target)
        if hosts[source] != hosts[target]:
            ends = (len(self.order) + hosts[source], len(self.order) + hosts[target])
        route = (2 * ends[0], 2 * ends[1] + 1, self.cluster.link(source, target))
        self.routes[source, target] = route
        return route
