"""The parameter server: synchronous steps by a recurrence over layers, others by a closed network of queues."""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job
from cnnstrategies.planning.cluster import slower
from cnnstrategies.planning.costs import GraphCosts

PART = 2**22  # bytes of a layer at once
STALENESS = 2  # of ssp, as its recipe has it


class ParameterServer:
    """Workers on all devices, a server process on each machine, whose connection both share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        cluster = job.cluster
        self.workers = cluster.devices
        self.servers = len(cluster.hosts)
        self.most = max(host.devices for host in cluster.hosts)
        # What workers send and what servers send back leaves a machine through the same connection.
        self.one_port = self.servers > 1
        self.link = slower(*(host.interconnect for host in cluster.hosts)) if self.one_port else cluster.hosts[0].inside
        # Of what a worker sends, the part for its own machine's server does not leave it.
        self.leaving = (self.servers - 1) / self.servers if self.one_port else 1.0

    def candidates(self) -> Iterator[Candidate]:
        """The three modes; the step of an asynchronous one is as many updates as there are workers."""
        job = self.job
        if not 2 <= self.workers <= job.samples:
            return
        equal = job.equal()
        mean = job.profile.at(job.samples / self.workers)
        free, waits = self._asynchronous(mean)
        # Nobody is far ahead of the slowest, so all go at its mean rate in the long run.
        bounded = max(free, mean.time / min(job.cluster.speeds))
        dealt = job.dealt(lambda counts: self._synchronous(counts)[0], 2 * mean.parameter_bytes)
        rows: list[tuple[str, dict[str, Any], Sequence[int], float, Bottleneck]] = [
            ("parameter_server", {}, equal, *self._synchronous(equal)),
            ("parameter_server", {"shares": "auto", "initial_shares": list(dealt)}, dealt, *self._synchronous(dealt)),
            ("parameter_server_async", {}, equal, free, waits),
            ("parameter_server_ssp", {"staleness": STALENESS}, equal, bounded, waits),
        ]
        for family, options, counts, step, bottleneck in rows if dealt != equal else (rows[0], *rows[2:]):
            learns = family != "parameter_server" or (counts != equal and job.profile.batch_norm)
            yield Candidate(
                family=family,
                options=options,
                effect=Effect.LEARNING if learns else Effect.ROUNDING,
                step=step,
                sent_bytes=round(2 * self.workers * mean.parameter_bytes * self.leaving),
                memory=2 * mean.parameter_bytes + job.profile.at(max(counts)).kept_bytes,
                bottleneck=bottleneck,
            )

    def _synchronous(self, counts: Sequence[int]) -> tuple[float, Bottleneck]:
        """The time between two steps: each layer's forward awaits its own weights, each push leaves in the backward."""
        costs, speed = self.job.slowest(counts)
        arrived = [0.0] * len(costs.nodes)
        ends: list[float] = []
        now = 0.0
        for _ in range(3):
            for index, node in enumerate(costs.nodes):
                now = max(now, arrived[index]) + node.forward / speed + self._messages(node.parameter_bytes)
            pushes: list[tuple[float, int]] = []
            for index in range(len(costs.nodes) - 1, -1, -1):
                node = costs.nodes[index]
                now += node.backward / speed + self._messages(node.parameter_bytes)
                # A large layer is sent in parts, which are applied and sent back while others still come.
                pushes += [(now, index)] * parts_of(node.parameter_bytes)
            arrived = self._arrivals(costs, pushes)
            ends.append(now)
        step = ends[-1] - ends[-2]
        moved, applied = (
            sum(map(of, (n.parameter_bytes for n in costs.nodes))) for of in (self._moving, self._applying)
        )
        if step < 1.5 * costs.time / speed:
            return step, "compute"
        return step, "server" if applied > moved else self.job.network

    def _arrivals(self, costs: GraphCosts, pushes: Sequence[tuple[float, int]]) -> list[float]:
        """When each layer's new values are there, from when each part of a layer is ready to be sent, in order."""
        arrived = [0.0] * len(costs.nodes)
        pushed = server = free = 0.0
        # By time: what is ready to leave, gradients by way of the workers' port, new values by way of the servers'.
        waiting = [(ready, False, index) for ready, index in pushes]
        heapq.heapify(waiting)
        while waiting:
            ready, is_back, index = heapq.heappop(waiting)
            size = costs.nodes[index].parameter_bytes
            parts = parts_of(size)
            moving = self._moving(size) / parts
            if is_back:
                free = max(free, ready) + moving
                arrived[index] = max(arrived[index], free + self.link.latency)
                pushed = free if self.one_port else pushed
            else:
                pushed = max(pushed, ready) + moving
                server = max(server, pushed + self.link.latency) + self._applying(size) / parts
                heapq.heappush(waiting, (server, True, index))
                free = pushed if self.one_port else free
        return arrived

    def _moving(self, size: int) -> float:
        """Seconds in which all workers of a machine send a layer, or its servers receive it."""
        return size * self.most * self.leaving / self.link.bandwidth

    def _applying(self, size: int) -> float:
        """Seconds in which a server handles its part of a layer from all workers."""
        return (size / self.job.cluster.server_rate + self._messages(size)) * self.workers / self.servers

    def _messages(self, size: int) -> float:
        """Seconds of a processor in which a layer's messages are sent or received."""
        return parts_of(size) * self.job.cluster.server_message

    def _asynchronous(self, costs: GraphCosts) -> tuple[float, Bottleneck]:
        """Seconds in which the workers make as many updates as they are.

        Mean value analysis (Reiser and Lavenberg, 1980): while a worker computes it is away; its update and its new
        weights pass through the machines' connections and the servers, a part of it through each at once.
        """
        speeds = self.job.cluster.speeds
        size = costs.parameter_bytes
        messages = sum(self._messages(node.parameter_bytes) for node in costs.nodes)
        away = costs.time / (sum(speeds) / len(speeds)) + 2 * messages
        moving = size * self.leaving / self.servers / self.link.bandwidth + self.link.latency
        server = (size / self.job.cluster.server_rate + messages) / self.servers
        ports = [2 * moving] if self.one_port else [moving, moving]
        step = self.workers / mean_value_analysis(away, [server, *ports], self.workers)
        if step < 1.5 * away:
            return step, "compute"
        return step, "server" if server > max(ports) else self.job.network


def parts_of(size: int) -> int:
    """In how many messages a layer is sent."""
    return -(-size // PART)


def mean_value_analysis(away: float, demands: Sequence[float], customers: int) -> float:
    """Customers per second that pass a closed network of queues.

    In a round each spends ``away`` seconds outside of the queues, and at each queue its demand, in seconds of service.
    """
    queues = [0.0] * len(demands)
    rate = 0.0
    for count in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = count / (away + sum(times))
        queues = [rate * time for time in times]
    return rate
