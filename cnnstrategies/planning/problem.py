"""A formula for the step time of a layout. The formula only needs sums over nodes, so a search can try many layouts."""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import NodeCost
from cnnstrategies.planning.memory import PeakMemory
from cnnstrategies.planning.sections import Section, StageMemory
from cnnstrategies.planning.stage_costs import BUCKET_BYTES, all_gather, all_reduce
from cnnstrategies.shares.dealing import deal, rotation, soonest

FEW = 8  # Largest number of replicas whose numbers of microbatches are reduced one at a time until they fit.


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
        memory: Peak memory of devices.
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
        self._statistics = self._sums(lambda node: node.statistics_bytes)
        self.memory = StageMemory(job, self.costs)
        self._devices = job.cluster.devices if job.replicas is None else sum(job.replicas)
        # Cached results of `_stage`, `dealt` and `_excess`, by their arguments.
        self._known: dict[Section, tuple[float, float]] = {}
        self._deals: dict[Section, tuple[int, ...]] = {}
        self._excesses: dict[Section, float] = {}

    def _sums(self, cost: Callable[[NodeCost], float]) -> list[float]:
        """Return the running sums of a cost over the nodes, starting with 0."""
        return list(itertools.accumulate(map(cost, self.costs.nodes), initial=0.0))

    def time(self, start: int, end: int) -> float:
        """Return the seconds of the forward and backward of nodes ``[start, end)`` on a device with speed 1.

        If the backward recomputes activations, the forward counts twice.
        """
        return self._time[end] - self._time[start]

    def sections(self, layout: Layout) -> list[Section]:
        """Return the nodes and the devices of each stage."""
        cuts, sections, first = layout.cuts, [], 0
        bounds = itertools.pairwise((0, *cuts, len(self.costs.nodes)))
        for (start, end), replicas in zip(bounds, layout.replicas, strict=True):
            sections.append(Section(start, end, first, replicas, self.memory.awaited(start, end, cuts)))
            first += replicas
        return sections

    def dealt(self, section: Section) -> tuple[int, ...]:
        """Return the number of microbatches of each replica of a stage.

        If the job sets shares, the microbatches are divided in proportion to the shares. Otherwise they are divided so
        that the stage finishes all microbatches as early as possible, and so that each replica's microbatches fit into
        the memory of its device. If no division fits, the limits of the memory are ignored.
        """
        if section not in self._deals:
            self._deals[section] = self._deal(section)
        return self._deals[section]

    def _deal(self, section: Section) -> tuple[int, ...]:
        devices = slice(section.first, section.first + section.replicas)
        if self.job.shares is not None:
            return deal(self.microbatches, self.job.shares[devices], least=1)
        speeds = self.cluster.speeds[devices]
        if not self.job.is_limited:
            return soonest(self.microbatches, speeds)
        limits, stretch = self.job.limits[devices], self._stretch(section, self.job.run_ahead or False)
        bounds = [self.microbatches] * section.replicas
        while min(bounds) > 0 and sum(bounds) >= self.microbatches:
            counts = soonest(self.microbatches, speeds, tuple(bounds))
            peaks = map(self.memory.peak, itertools.repeat(section), counts, _held(counts, stretch))
            over = [peak.total - limit for peak, limit in zip(peaks, limits, strict=True)]
            if max(over) <= 0:
                return counts
            if len(set(zip(speeds, limits, strict=True))) == 1:
                break  # Of equal devices, no other numbers of microbatches need less memory.
            # Of the replicas that are too full, the one with most microbatches gets one less, and the microbatches are
            # divided again. Others may fit then, because the order of the microbatches changes as well. With many
            # replicas this would take long, so all that are too full get one microbatch less.
            full = [replica for replica, size in enumerate(over) if size > 0]
            for replica in full if section.replicas > FEW else [max(full, key=counts.__getitem__)]:
                bounds[replica] = counts[replica] - 1
        return soonest(self.microbatches, speeds)

    def _stretch(self, section: Section, run_ahead: bool) -> int:
        """Return the number of consecutive microbatches that all replicas of a stage together may hold at once."""
        if self.job.schedule != "1f1b":
            return self.microbatches
        # The number of ranks from this stage to the last stage, and one more if stages run ahead.
        return self._devices - section.first + (run_ahead and section.end != len(self.costs.nodes))

    def shares(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of microbatches of each device.

        If every stage divides its microbatches as equal shares would, the layout needs no shares, and the tuple is
        empty.
        """
        stages = [self.dealt(section) for section in self.sections(layout)]
        equal = all(counts == deal(self.microbatches, [1] * len(counts)) for counts in stages)
        return () if equal else tuple(itertools.chain(*stages))

    def work(self, section: Section) -> tuple[int, float]:
        """Return the number of microbatches and the device speed of the slowest replica of a stage.

        The slowest replica takes longest for all its microbatches together.
        """
        devices = slice(section.first, section.first + section.replicas)
        pairs = zip(self.dealt(section), self.cluster.speeds[devices], strict=True)
        return max(pairs, key=lambda pair: pair[0] / pair[1])

    def flights(self, section: Section, run_ahead: bool) -> tuple[int, ...]:
        """Return the largest number of microbatches that each replica of a stage holds at once.

        Args:
            section: The stage.
            run_ahead: Whether stages hold one additional microbatch.
        """
        # The microbatches that the replicas of a stage hold at once are consecutive. A replica holds those that belong
        # to it.
        return _held(self.dealt(section), self._stretch(section, run_ahead))

    def device_peaks(self, layout: Layout, run_ahead: bool) -> list[PeakMemory]:
        """Return the peak memory of each device.

        Args:
            layout: Cuts and replicas.
            run_ahead: Whether stages hold one additional microbatch.
        """
        return [
            self.memory.peak(section, count, held)
            for section in self.sections(layout)
            for count, held in zip(self.dealt(section), self.flights(section, run_ahead), strict=True)
        ]

    def excess(self, layout: Layout) -> float:
        """Return the largest number of bytes by which a device exceeds its memory; 0 if no device does."""
        return max(map(self._excess, self.sections(layout))) if self.job.is_limited else 0.0

    def _excess(self, section: Section) -> float:
        if section not in self._excesses:
            limits = self.job.limits[section.first : section.first + section.replicas]
            flights = self.flights(section, self.job.run_ahead or False)
            over = [
                self.memory.peak(section, count, held).total - limit
                for count, held, limit in zip(self.dealt(section), flights, limits, strict=True)
            ]
            self._excesses[section] = max(0.0, *over)
        return self._excesses[section]

    def model(self, layout: Layout) -> float:
        """Return the step time in seconds according to the formula of this class."""
        fill = slowest = 0.0
        for section in self.sections(layout):
            if section not in self._known:
                self._known[section] = self._stage(section)
            time, others = self._known[section]
            fill, slowest = fill + time, max(slowest, others)
        return fill + slowest

    def _stage(self, section: Section) -> tuple[float, float]:
        """Return the two times of a stage from which :meth:`model` computes the step time, in seconds.

        Returns:
            First, the time of one microbatch: its forward and backward, and the transfers to and from the next stage.
            Second, the additional time for the other microbatches and for the reduction of the gradients.
        """
        start, end, first, replicas, _ = section
        costs, cluster, after = self.costs, self.cluster, first + replicas
        rounds, speed = self.work(section)
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
        results = (
            gather(costs.output_bytes * self.microbatches / replicas) if section.end == len(self.costs.nodes) else 0.0
        )
        whole = statistics + reduction(parameters) - self._drain[end] / speed
        bucket = reduction(min(parameters, BUCKET_BYTES)) - self._drain[start] / speed
        return time + transfer, (rounds - 1) * period + max(0.0, whole, bucket) + results

    def bound(self, layout: Layout) -> float:
        """Return a lower bound for the step time in seconds.

        A stage cannot start before a microbatch has passed all earlier stages. The stage then needs the time for all
        its microbatches. For each stage, the sum of these two times is a lower bound. The result is the largest sum.
        """
        before = longest = 0.0
        for section in self.sections(layout):
            start, end, first, replicas, _ = section
            rounds, speed = self.work(section)
            longest = max(longest, before + rounds * self.time(start, end) / speed)
            before += self.time(start, end) / max(self.cluster.speeds[first : first + replicas])
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
def _held(counts: tuple[int, ...], stretch: int) -> tuple[int, ...]:
    """Return, for each replica, the largest number of its microbatches among any ``stretch`` consecutive microbatches.

    Args:
        counts: Number of microbatches of each replica in a step.
        stretch: Number of consecutive microbatches.
    """
    if stretch >= sum(counts):
        return counts
    microbatches_of: list[list[int]] = [[] for _ in counts]
    for microbatch, replica in enumerate(rotation(counts, sum(counts))):
        microbatches_of[replica].append(microbatch)
    return tuple(
        max(
            (bisect_left(microbatches, microbatch + stretch) - index for index, microbatch in enumerate(microbatches)),
            default=0,
        )
        for microbatches in microbatches_of
    )
