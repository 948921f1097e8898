"""The closed model of a layout's step time, from sums over the nodes: quick, for a search among many layouts."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import NodeCost
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, all_reduce
from cnnstrategies.shares import deal, rotation, soonest


class Problem:
    """What a layout is chosen for.

    The step time is that of one microbatch through all stages and back, and what the slowest stage adds for the others:
    the model of Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), section 3.1,
    which minimises the time of the slowest stage; here the fill and drain of a synchronous step count too.

    Its costs are those of one microbatch.
    """

    def __init__(self, job: Job) -> None:
        assert job.microbatches is not None
        self.job = job
        self.cluster = job.cluster
        self.microbatches = job.microbatches
        self.costs = job.profile.at(job.samples / job.microbatches)
        self.recomputes = job.activation_checkpointing != "never"
        forwards = 2 if self.recomputes else 1
        # Of the nodes before each position.
        self._time = self._sums(lambda node: forwards * node.forward + node.backward)
        self._drain = self._sums(lambda node: node.backward)
        self._parameters = self._sums(lambda node: node.parameter_bytes)
        self._saved = self._sums(lambda node: node.saved_bytes)
        self._known: dict[tuple[int, int, int, int], tuple[float, float]] = {}

    def _sums(self, of: Callable[[NodeCost], float]) -> list[float]:
        return list(itertools.accumulate(map(of, self.costs.nodes), initial=0.0))

    def time(self, start: int, end: int) -> float:
        """Seconds of forward and backward of some nodes, on a device of speed 1."""
        return self._time[end] - self._time[start]

    def stages(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """Of each stage its first node, the next one's and its replicas."""
        bounds = (0, *layout.cuts, len(self.costs.nodes))
        return zip(bounds[:-1], bounds[1:], layout.replicas, strict=True)

    def dealt(self, first: int, replicas: int) -> tuple[int, ...]:
        """Microbatches of each replica of a stage, counted from its first device: as they end soonest, unless given."""
        if self.job.shares is not None:
            return deal(self.microbatches, self.job.shares[first : first + replicas], least=1)
        return soonest(self.microbatches, self.cluster.speeds[first : first + replicas])

    def shares(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Microbatches of each device; empty where the replicas of each stage have as many, to within one."""
        stages = [self.dealt(sum(replicas[:stage]), count) for stage, count in enumerate(replicas)]
        return tuple(itertools.chain(*stages)) if any(max(one) > min(one) + 1 for one in stages) else ()

    def work(self, first: int, replicas: int) -> tuple[int, float]:
        """Microbatches of the replica of a stage that takes longest for its own, and its device's speed."""
        pairs = zip(self.dealt(first, replicas), self.cluster.speeds[first : first + replicas], strict=True)
        return max(pairs, key=lambda pair: pair[0] / pair[1])

    def flights(self, replicas: Sequence[int], stage: int, run_ahead: bool) -> int:
        """Most microbatches that a replica of a stage holds at once."""
        counts = self.dealt(sum(replicas[:stage]), replicas[stage])
        if self.job.schedule != "1f1b":
            return max(counts)
        # A backward comes after the forwards of as many microbatches as there are ranks from this stage on.
        return _most_of_one(counts, sum(replicas[stage:]) + (run_ahead and stage + 1 < len(replicas)))

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest device holds at most, since what only passes a stage is counted there, too."""
        most = 0.0
        for stage, (start, end, _) in enumerate(self.stages(layout)):
            peak = self.flights(layout.replicas, stage, self.job.run_ahead or False)
            received = self.costs.sent_bytes[start] if start else self.costs.input_bytes
            kept = (1 if self.recomputes else peak) * (self._saved[end] - self._saved[start])
            state = self.job.state_copies * (self._parameters[end] - self._parameters[start])
            most = max(most, state + peak * received + kept)
        return most

    def model(self, layout: Layout) -> float:
        """Step time in seconds."""
        fill = slowest = 0.0
        first = 0
        for start, end, replicas in self.stages(layout):
            key = (start, end, first, replicas)
            if key not in self._known:
                self._known[key] = self._stage(*key)
            time, others = self._known[key]
            fill, slowest = fill + time, max(slowest, others)
            first += replicas
        return fill + slowest

    def _stage(self, start: int, end: int, first: int, replicas: int) -> tuple[float, float]:
        """Seconds in which a microbatch passes a stage, with its transfers to the next, and what the others add."""
        costs, cluster, after = self.costs, self.cluster, first + replicas
        rounds, speed = self.work(first, replicas)
        time = self.time(start, end) / speed
        transfer = 0.0
        if after < cluster.devices:
            link = cluster.link(after - 1, after)
            transfer = link.time(costs.sent_bytes[end]) + link.time(costs.sent_gradient_bytes[end])
        period = time
        before = max(0, first - 1)
        around = min(cluster.devices, after + 1) - before
        if around > 1:
            # Each device sends and receives through one port per direction; those of a machine share theirs to others.
            hosts = {cluster.host_of[device] for device in range(before, before + around)}
            sharing = min(replicas, max(cluster.hosts[host].devices for host in hosts)) if len(hosts) > 1 else 1
            incoming = costs.sent_bytes[start] + costs.sent_gradient_bytes[end]
            outgoing = costs.sent_bytes[end] + costs.sent_gradient_bytes[start]
            port = cluster.ring(before, around).bandwidth
            period = max(period, max(incoming, outgoing) * sharing / port)
        # Gradients are reduced while this stage's last backward and those of the stages before it run; the last bucket
        # only while the latter run.
        reduction = all_reduce(cluster, first, replicas)
        parameters = self._parameters[end] - self._parameters[start]
        whole = reduction(parameters) - self._drain[end] / speed
        bucket = reduction(min(parameters, BUCKET_BYTES)) - self._drain[start] / speed
        return time + transfer, (rounds - 1) * period + max(0.0, whole, bucket)

    def bound(self, layout: Layout) -> float:
        """A step time that the layout cannot fall below: one stage's work after one pass of those before it."""
        first, before, longest = 0, 0.0, 0.0
        for start, end, replicas in self.stages(layout):
            rounds, speed = self.work(first, replicas)
            longest = max(longest, before + rounds * self.time(start, end) / speed)
            before += self.time(start, end) / max(self.cluster.speeds[first : first + replicas])
            first += replicas
        return longest

    def filled(self, cuts: tuple[int, ...], unit: int = 1) -> Layout:
        """The cuts with all devices, so many at a time given to the stage that is slowest then."""
        bounds = (0, *cuts, len(self.costs.nodes))
        times = [self.time(start, end) for start, end in itertools.pairwise(bounds)]
        replicas = [min(unit, self.microbatches)] * len(times)
        queue = [(-time, stage) for stage, time in enumerate(times)]
        heapq.heapify(queue)
        spare = self.cluster.devices - sum(replicas)
        while spare >= unit and queue:
            _, stage = heapq.heappop(queue)
            if replicas[stage] + unit <= self.microbatches:
                replicas[stage] += unit
                spare -= unit
                heapq.heappush(queue, (-times[stage] / replicas[stage], stage))
        return Layout(cuts, tuple(replicas))


@lru_cache(maxsize=4096)
def _most_of_one(counts: tuple[int, ...], stretch: int) -> int:
    """Most microbatches of so many in a row that one replica runs."""
    own: list[list[int]] = [[] for _ in counts]
    for microbatch, replica in enumerate(rotation(counts, sum(counts))):
        own[replica].append(microbatch)
    return max(bisect_left(one, m + stretch) - index for one in own for index, m in enumerate(one))
