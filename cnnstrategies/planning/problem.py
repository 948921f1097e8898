"""A formula for the step time of a layout. The formula only needs sums over nodes, so a search can try many layouts."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import NodeCost
from cnnstrategies.planning.memory import PartMemory, PeakMemory, StageLoad, StageTraffic, part_memory, stage_peak
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, all_gather, all_reduce
from cnnstrategies.shares import deal, rotation, soonest


class Problem:
    """The task of choosing a layout for a job, with the formulas that predict a layout's step time and memory.

    The predicted step time is the time of one microbatch through all stages and back, plus the time that the slowest
    stage needs for the other microbatches.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), section 3.1. The
    paper minimises the time of the slowest stage. This class also counts the filling and draining of the pipeline,
    because they are part of every synchronous step.

    Attributes:
        microbatches: Number of microbatches of a step.
        costs: Costs of the network for one microbatch.
        recomputes: Whether the backward recomputes activations.
    """

    def __init__(self, job: Job) -> None:
        assert job.microbatches is not None
        self.job = job
        self.cluster = job.cluster
        self.microbatches = job.microbatches
        self.costs = job.profile.at(job.samples / job.microbatches)
        self.recomputes = job.checkpointings[0] != "never"
        forwards = 2 if self.recomputes else 1
        # In each of these lists, element i is the sum over the nodes before node i.
        self._time = self._sums(lambda node: forwards * node.forward + node.backward)
        self._drain = self._sums(lambda node: node.backward)
        self._parameters = self._sums(lambda node: node.parameter_bytes)
        # Cached results of `part_memory`. Keys are the first node and the end of a part.
        self._parts: dict[tuple[int, int], PartMemory] = {}
        self._statistics = self._sums(lambda node: node.statistics_bytes)
        # Cached results of `_stage`. Keys are the arguments of `_stage`.
        self._known: dict[tuple[int, int, int, int], tuple[float, float]] = {}

    def _sums(self, cost: Callable[[NodeCost], float]) -> list[float]:
        """Return the running sums of a cost over the nodes, starting with 0."""
        return list(itertools.accumulate(map(cost, self.costs.nodes), initial=0.0))

    def time(self, start: int, end: int) -> float:
        """Return the seconds of the forward and backward of nodes ``[start, end)`` on a device with speed 1.

        If the backward recomputes activations, the forward counts twice.
        """
        return self._time[end] - self._time[start]

    def stages(self, layout: Layout) -> Iterator[tuple[int, int, int]]:
        """Yield, for each stage: index of the first node, index after the last node, and number of replicas."""
        bounds = (0, *layout.cuts, len(self.costs.nodes))
        return zip(bounds[:-1], bounds[1:], layout.replicas, strict=True)

    def dealt(self, first: int, replicas: int) -> tuple[int, ...]:
        """Return the number of microbatches of each replica of a stage.

        If the job sets shares, the microbatches are divided in proportion to the shares. Otherwise they are divided so
        that the stage finishes all microbatches as early as possible.

        Args:
            first: First device of the stage.
            replicas: Number of replicas of the stage.
        """
        if self.job.shares is not None:
            return deal(self.microbatches, self.job.shares[first : first + replicas], least=1)
        return soonest(self.microbatches, self.cluster.speeds[first : first + replicas])

    def shares(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Return the number of microbatches of each device.

        If the numbers differ by at most one within every stage, the layout needs no shares, and the tuple is empty.
        """
        stages = [self.dealt(sum(replicas[:stage]), count) for stage, count in enumerate(replicas)]
        return tuple(itertools.chain(*stages)) if any(max(counts) > min(counts) + 1 for counts in stages) else ()

    def work(self, first: int, replicas: int) -> tuple[int, float]:
        """Return the number of microbatches and the device speed of the slowest replica of a stage.

        The slowest replica takes longest for all its microbatches together.

        Args:
            first: First device of the stage.
            replicas: Number of replicas of the stage.
        """
        pairs = zip(self.dealt(first, replicas), self.cluster.speeds[first : first + replicas], strict=True)
        return max(pairs, key=lambda pair: pair[0] / pair[1])

    def flights(self, replicas: Sequence[int], stage: int, run_ahead: bool) -> int:
        """Return the largest number of microbatches that a replica of a stage holds at once.

        Args:
            replicas: Number of replicas of each stage.
            stage: Index of the stage.
            run_ahead: Whether stages hold one additional microbatch.
        """
        counts = self.dealt(sum(replicas[:stage]), replicas[stage])
        if self.job.schedule != "1f1b":
            return max(counts)
        # The microbatches that the replicas of a stage hold at once are consecutive. Their number is at most the number
        # of ranks from this stage to the last stage, and one more if stages run ahead. The result is the largest number
        # of these microbatches that belong to one replica.
        return _most_for_one_replica(counts, sum(replicas[stage:]) + (run_ahead and stage + 1 < len(replicas)))

    def kept(self, peak: int) -> int:
        """Return the largest number of microbatches whose activations a device holds at once.

        Args:
            peak: Largest number of microbatches whose inputs a device holds at once.
        """
        # Recomputed activations live as long as one backward. Under `except_last`, the last microbatch's activations
        # are held at the same time.
        return min(peak, {"never": peak, "except_last": 2, "always": 1}[self.job.checkpointings[0]])

    def peak(self, layout: Layout, stage: int, traffic: StageTraffic, run_ahead: bool) -> PeakMemory:
        """Return the peak memory of a device of a stage.

        Args:
            layout: Cuts and replicas.
            stage: Index of the stage.
            traffic: Bytes of the stage's messages for one microbatch.
            run_ahead: Whether stages hold one additional microbatch.
        """
        start, end, replicas = list(self.stages(layout))[stage]
        if (start, end) not in self._parts:
            self._parts[start, end] = part_memory(self.costs, start, end)
        held = self.flights(layout.replicas, stage, run_ahead)
        own = max(self.dealt(sum(layout.replicas[:stage]), replicas))
        load = StageLoad(
            own=own,
            held=held,
            kept=self.kept(held),
            interleaved=self.job.schedule == "1f1b",
            replicas=replicas,
            images=0 if stage else own * self.costs.input_bytes,
            # The replicas of the last stage hold the results of the microbatches, the result of the whole batch, and
            # its gradient.
            outputs=3 * self.microbatches * self.costs.output_bytes if stage == len(layout.replicas) - 1 else 0,
        )
        return stage_peak(self._parts[start, end], traffic, load, self.job.state, self.costs.framework_bytes)

    def memory(self, layout: Layout) -> float:
        """Return an upper bound for the largest number of bytes that a device holds.

        The result is only a bound, because a stage is assumed to receive all values that cross the cut before it, even
        values that only later stages use.
        """
        peaks = []
        for stage, (start, end, _) in enumerate(self.stages(layout)):
            traffic = StageTraffic(
                self.costs.sent_bytes[start] if start else 0,
                self.costs.sent_gradient_bytes[start] if start else 0,
                self.costs.sent_gradient_bytes[end],
            )
            peaks.append(self.peak(layout, stage, traffic, self.job.run_ahead or False).total)
        return max(peaks)

    def model(self, layout: Layout) -> float:
        """Return the step time in seconds according to the formula of this class."""
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
        """Return the two times of a stage from which :meth:`model` computes the step time, in seconds.

        Args:
            start: Index of the stage's first node.
            end: Index of the stage's last node, plus 1.
            first: Number of the stage's first device.
            replicas: Number of replicas of the stage.

        Returns:
            First, the time of one microbatch: its forward and backward, and the transfers to and from the next stage.
            Second, the additional time for the other microbatches and for the reduction of the gradients.
        """
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
            # A device has its own ports for messages inside its machine, but all devices of a machine share its ports
            # to other machines. `sharing` is the number of replicas that share a port.
            hosts = {cluster.host_of[device] for device in range(before, before + around)}
            sharing = min(replicas, max(cluster.hosts[host].devices for host in hosts)) if len(hosts) > 1 else 1
            incoming = costs.sent_bytes[start] + costs.sent_gradient_bytes[end]
            outgoing = costs.sent_bytes[end] + costs.sent_gradient_bytes[start]
            port = cluster.ring(before, around).bandwidth
            period = max(period, max(incoming, outgoing) * sharing / port)
        # Reductions overlap with the last backward pass of this stage, and then with the last backward passes of
        # earlier stages. The last bucket is only ready at the end of this stage's backward pass, so it overlaps with
        # earlier stages only. `whole` is the time in seconds by which the reduction of all buckets, and the exchange of
        # the means and variances of batch normalisation before them, is longer than all of these passes. `bucket` is
        # the time by which the reduction of the last bucket is longer than the passes of the earlier stages.
        reduction = all_reduce(cluster, first, replicas)
        parameters = self._parameters[end] - self._parameters[start]
        gather = all_gather(cluster, first, replicas)
        statistics = gather(self._statistics[end] - self._statistics[start])
        is_last = end == len(costs.nodes)
        results = gather(costs.output_bytes * self.microbatches / replicas) if is_last else 0.0
        whole = statistics + reduction(parameters) - self._drain[end] / speed
        bucket = reduction(min(parameters, BUCKET_BYTES)) - self._drain[start] / speed
        return time + transfer, (rounds - 1) * period + max(0.0, whole, bucket) + results

    def bound(self, layout: Layout) -> float:
        """Return a lower bound for the step time in seconds.

        A stage cannot start before a microbatch has passed all earlier stages. The stage then needs the time for all
        its microbatches. For each stage, the sum of these two times is a lower bound. The result is the largest sum.
        """
        first, before, longest = 0, 0.0, 0.0
        for start, end, replicas in self.stages(layout):
            rounds, speed = self.work(first, replicas)
            longest = max(longest, before + rounds * self.time(start, end) / speed)
            before += self.time(start, end) / max(self.cluster.speeds[first : first + replicas])
            first += replicas
        return longest

    def filled(self, cuts: tuple[int, ...], unit: int = 1) -> Layout:
        """Return a layout with the given cuts, and with numbers of replicas that balance the times of the stages.

        Each stage begins with ``unit`` devices. Then the currently slowest stage repeatedly gets ``unit`` more devices,
        until fewer than ``unit`` devices are left. No stage gets more replicas than there are microbatches. The layout
        may have fewer devices than the cluster.
        """
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
def _most_for_one_replica(counts: tuple[int, ...], stretch: int) -> int:
    """Return the largest number of microbatches that one replica has among any ``stretch`` consecutive microbatches.

    Args:
        counts: Number of microbatches of each replica in a step.
        stretch: Number of consecutive microbatches.
    """
    microbatches_of: list[list[int]] = [[] for _ in counts]
    for microbatch, replica in enumerate(rotation(counts, sum(counts))):
        microbatches_of[replica].append(microbatch)
    return max(
        bisect_left(microbatches, microbatch + stretch) - index
        for microbatches in microbatches_of
        for index, microbatch in enumerate(microbatches)
    )
