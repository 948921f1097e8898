"""Predictions for the parameter server.

Synchronous steps are computed by a recurrence over the layers, asynchronous steps by a closed network of queues.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job
from cnnstrategies.planning.cluster import slower
from cnnstrategies.planning.costs import GraphCosts

PART = 2**22  # Bytes of a layer in one message.
STALENESS = 2  # The staleness of the recipe parameter_server_ssp.


class ParameterServer:
    """A parameter server with workers on all devices and one server process on each machine.

    The workers and the server of a machine share its connection to the other machines.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        cluster = job.cluster
        self.workers = cluster.devices
        self.servers = len(cluster.hosts)
        self.most = max(host.devices for host in cluster.hosts)
        # Pushes of the workers and answers of the server leave a machine through the same connection.
        self.one_port = self.servers > 1
        self.link = slower(*(host.interconnect for host in cluster.hosts)) if self.one_port else cluster.hosts[0].inside
        # The part of a worker's pushes that leaves its machine: pushes to the server on the same machine do not.
        self.leaving = (self.servers - 1) / self.servers if self.one_port else 1.0

    def candidates(self) -> Iterator[Candidate]:
        """Yield candidates of the three modes; a step of an asynchronous mode has as many updates as workers."""
        job = self.job
        if not 2 <= self.workers <= job.samples:
            return
        equal = job.equal()
        mean = job.profile.at(job.samples / self.workers)
        free, waits = self._asynchronous(mean)
        # No worker is far ahead of the slowest worker, so that in the long run all advance at the slowest one's rate.
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
        """Return the seconds between two synchronous steps, and their bottleneck.

        The forward of each layer waits for the layer's own weights, and each push leaves during the backward.
        """
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
                # A large layer is sent in parts: the first ones are applied and sent back while others still arrive.
                pushes += [(now, index)] * parts_of(node.parameter_bytes)
            arrived = self._arrivals(costs, pushes)
            ends.append(now)
        step = ends[-1] - ends[-2]
        moved, applied = (
            sum(map(seconds_of, (n.parameter_bytes for n in costs.nodes)))
            for seconds_of in (self._moving, self._applying)
        )
        if step < 1.5 * costs.time / speed:
            return step, "compute"
        return step, "server" if applied > moved else self.job.network

    def _arrivals(self, costs: GraphCosts, pushes: Sequence[tuple[float, int]]) -> list[float]:
        """Return the time at which each layer's new values arrive.

        Args:
            costs: Costs of the network.
            pushes: Time at which each part of a layer is ready to be sent, with the index of the layer, in order.
        """
        arrived = [0.0] * len(costs.nodes)
        pushed = server = free = 0.0
        # Parts that wait to be sent, in order of time: gradients through the workers' port, new values through the
        # servers' port.
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
        """Return the seconds in which all workers of a machine send a layer, or its server receives the layer."""
        return size * self.most * self.leaving / self.link.bandwidth

    def _applying(self, size: int) -> float:
        """Return the seconds in which a server processes its part of a layer from all workers."""
        return (size / self.job.cluster.server_rate + self._messages(size)) * self.workers / self.servers

    def _messages(self, size: int) -> float:
        """Return the processor seconds in which a layer's messages are sent or received."""
        return parts_of(size) * self.job.cluster.server_message

    def _asynchronous(self, costs: GraphCosts) -> tuple[float, Bottleneck]:
        """Return the seconds in which the workers together make one update each, and the bottleneck.

        Source: mean value analysis (Reiser and Lavenberg, 1980). A worker that computes is outside of the queues. Its
        update and its new weights pass through the machines' connections and the servers, with an equal part of them
        through each machine at the same time.
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
    """Return the number of messages in which a layer of ``size`` bytes is sent."""
    return -(-size // PART)


def mean_value_analysis(away: float, demands: Sequence[float], customers: int) -> float:
    """Return the number of customers per second that pass a closed network of queues.

    Args:
        away: Seconds that a customer spends outside of the queues in each round.
        demands: Seconds of service that a customer needs at each queue in a round.
        customers: Number of customers.
    """
    queues = [0.0] * len(demands)
    rate = 0.0
    for count in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = count / (away + sum(times))
        queues = [rate * time for time in times]
    return rate
