"""Predict step times of the parameter server.

For synchronous steps, a simulation computes when each layer is computed, sent and updated. For asynchronous steps,
workers and servers are modelled as a closed network of queues.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cnnstrategies.planning.candidates import Bottleneck, Candidate, Effect, Job
from cnnstrategies.planning.cluster import slower
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.memory import NO_STATE, PeakMemory, replica_peak, shared_slices
from cnnstrategies.planning.recompute import RECOMPUTED, choose_segments, recomputed_peak

PART = 2**22  # Largest size of a message in bytes. The values of a larger layer are sent in several messages.
STALENESS = 2  # Staleness in the mode ssp. The recipe `parameter_server_ssp` has the same value.


class ParameterServer:
    """A model of the parameter server, with a worker on each device and a server process on each machine.

    The workers and the server of a machine share the machine's connection to other machines.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        cluster = job.cluster
        self.workers = cluster.devices
        self.servers = len(cluster.hosts)
        self.most = max(host.devices for host in cluster.hosts)
        # With several machines, the workers' pushes and the server's replies leave a machine through one connection, so
        # pushes and replies share the bandwidth of this connection.
        self.one_port = self.servers > 1
        self.link = slower(*(host.interconnect for host in cluster.hosts)) if self.one_port else cluster.hosts[0].inside
        # Fraction of a worker's pushes that goes through `link`. With several machines, a worker does not use the
        # network for pushes to the server on its own machine.
        self.leaving = (self.servers - 1) / self.servers if self.one_port else 1.0

    def candidates(self) -> Iterator[Candidate]:
        """Yield candidates of the modes sync, async and ssp.

        The step time of async and ssp is the time in which each worker makes one update on average.
        """
        job = self.job
        if not 2 <= self.workers <= job.samples:
            return
        equal = job.equal()
        mean = job.profile.at(job.samples / self.workers)
        free, waits = self._asynchronous(mean)
        # With ssp, no worker can be far ahead of the slowest worker, so in the long run all workers are as slow as the
        # slowest worker.
        bounded = max(free, mean.time / min(job.cluster.speeds))
        dealt = job.dealt(lambda counts: self._synchronous(counts)[0], self._peak)
        rows: list[tuple[str, dict[str, Any], Sequence[int], float, Bottleneck]] = [
            ("parameter_server", {}, equal, *self._synchronous(equal)),
            ("parameter_server", self._shares(dealt), dealt, *self._synchronous(dealt)),
            ("parameter_server_async", {}, equal, free, waits),
            ("parameter_server_ssp", {"staleness": STALENESS}, equal, bounded, waits),
        ]
        for family, options, counts, step, bottleneck in rows if dealt != equal else (rows[0], *rows[2:]):
            learns = family != "parameter_server" or (counts != equal and job.profile.batch_norm)
            row = Candidate(
                family=family,
                options=options,
                effect=Effect.LEARNING if learns else Effect.ROUNDING,
                step=step,
                sent_bytes=round(2 * self.workers * mean.parameter_bytes * self.leaving),
                loads=job.loads(counts, self._peak),
                bottleneck=bottleneck,
            )
            yield row
            if job.excess(row.memories):
                yield replace(
                    row,
                    options={**options, RECOMPUTED: "except_last"},
                    step=step + choose_segments(job.slowest(counts)[0]).again / job.slowest(counts)[1],
                    loads=job.loads(counts, lambda count: recomputed_peak(job.profile.at(count), NO_STATE)),
                )

    def _peak(self, count: int) -> PeakMemory:
        """Return the peak memory of a worker from its number of samples."""
        profile = self.job.profile
        return replica_peak(profile.at(count), NO_STATE, shared=shared_slices(profile.costs, self.servers))

    def _shares(self, counts: Sequence[int]) -> dict[str, Any]:
        """Return the options for shares. They are fixed if a device's memory has no room for one more sample."""
        most = self.job.most_samples(self._peak)
        if any(count + 1 > fitting for count, fitting in zip(counts, most, strict=True)):
            return {"shares": list(counts)}
        return {"shares": "auto", "initial_shares": list(counts)}

    def _synchronous(self, counts: Sequence[int]) -> tuple[float, Bottleneck]:
        """Return the seconds of a synchronous step, and the bottleneck.

        The forward of a layer waits only for the new weights of this layer. A layer's gradients are pushed while the
        backward of earlier layers runs.

        Args:
            counts: Number of samples of each worker.
        """
        costs, speed = self.job.slowest(counts)
        arrived = [0.0] * len(costs.nodes)
        ends: list[float] = []
        now = 0.0
        for _ in range(3):
            for index, node in enumerate(costs.nodes):
                now = max(now, arrived[index]) + node.forward / speed + self._message_time(node.parameter_bytes)
            pushes: list[tuple[float, int]] = []
            for index in range(len(costs.nodes) - 1, -1, -1):
                node = costs.nodes[index]
                now += node.backward / speed + self._message_time(node.parameter_bytes)
                # A large layer is sent in several messages, which are simulated separately. While the last messages
                # still arrive, the server applies the gradients of the first messages and sends new weights back.
                pushes += [(now, index)] * parts_of(node.parameter_bytes)
            arrived = self._arrival_times(costs, pushes)
            ends.append(now)
        step = ends[-1] - ends[-2]
        moved, applied = (
            sum(map(seconds_of, (n.parameter_bytes for n in costs.nodes)))
            for seconds_of in (self._transfer_time, self._server_time)
        )
        if step < 1.5 * costs.time / speed:
            return step, "compute"
        return step, "server" if applied > moved else self.job.network

    def _arrival_times(self, costs: GraphCosts, pushes: Sequence[tuple[float, int]]) -> list[float]:
        """Return, for each layer, the time in seconds at which the layer's new weights have arrived at the workers.

        Args:
            costs: Costs of the network.
            pushes: The messages with gradients, in order of time. For each message: the time in seconds from which it
                can be sent, and the index of its layer.
        """
        arrived = [0.0] * len(costs.nodes)
        pushed = server = free = 0.0
        # Heap of the messages that wait to be sent. For each message: the time from which it can be sent, whether a
        # server sends it (new weights) or a worker (gradients), and the index of its layer. With several machines,
        # gradients and new weights share one port. Otherwise each of the two has its own port.
        waiting = [(ready, False, index) for ready, index in pushes]
        heapq.heapify(waiting)
        while waiting:
            ready, is_back, index = heapq.heappop(waiting)
            size = costs.nodes[index].parameter_bytes
            parts = parts_of(size)
            moving = self._transfer_time(size) / parts
            if is_back:
                free = max(free, ready) + moving
                arrived[index] = max(arrived[index], free + self.link.latency)
                pushed = free if self.one_port else pushed
            else:
                pushed = max(pushed, ready) + moving
                server = max(server, pushed + self.link.latency) + self._server_time(size) / parts
                heapq.heappush(waiting, (server, True, index))
                free = pushed if self.one_port else free
        return arrived

    def _transfer_time(self, size: int) -> float:
        """Return the seconds for which a layer's gradients occupy a machine's connection.

        The result counts the pushes of all workers of the machine. The layer's new weights occupy the connection for an
        equal time.

        Args:
            size: Bytes of the layer's parameters.
        """
        return size * self.most * self.leaving / self.link.bandwidth

    def _server_time(self, size: int) -> float:
        """Return the seconds that a server takes to apply all workers' gradients to the server's part of a layer.

        Args:
            size: Bytes of the parameters of the whole layer.
        """
        return (size / self.job.cluster.server_rate + self._message_time(size)) * self.workers / self.servers

    def _message_time(self, size: int) -> float:
        """Return the CPU time in seconds that sending or receiving the messages of a layer takes.

        Args:
            size: Bytes of the layer's parameters.
        """
        return parts_of(size) * self.job.cluster.server_message

    def _asynchronous(self, costs: GraphCosts) -> tuple[float, Bottleneck]:
        """Return the seconds in which each worker makes one update on average, and the bottleneck.

        The workers are the customers of a closed network of queues. While a worker computes, it is outside of the
        queues. After the computation, its gradients and its new weights pass through queues: a server, and the server's
        connection. Each server handles an equal part of the weights, and all servers work at the same time. Therefore
        the model has only one server.

        Source: mean value analysis (Reiser and Lavenberg, 1980).

        Args:
            costs: Costs of the network for the mean number of samples of a worker.
        """
        speeds = self.job.cluster.speeds
        size = costs.parameter_bytes
        messages = sum(self._message_time(node.parameter_bytes) for node in costs.nodes)
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
    """Return the throughput of a closed network of queues, in customers per second.

    Args:
        away: Seconds that a customer spends outside of the queues in each round.
        demands: For each queue, the service time of a customer in each round, in seconds, without waiting.
        customers: Number of customers in the network.
    """
    queues = [0.0] * len(demands)
    rate = 0.0
    for count in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = count / (away + sum(times))
        queues = [rate * time for time in times]
    return rate
