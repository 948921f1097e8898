"""Which machine each rank is on, and where the devices of a stage are in a search from the last stage to the first."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timetable import Order, Placement
from cnnstrategies.planning.cluster import Cluster, Host, slower
from cnnstrategies.planning.costs import Link


def orders(cluster: Cluster, layout: Layout) -> list[Order]:
    """The ways to number the ranks that make a difference."""
    several = len(cluster.hosts) > 1 and any(host.devices > 1 for host in cluster.hosts)
    if several and len(layout.replicas) > 1 and gcd(*layout.replicas) > 1:
        return ["stages", "replicas"]
    return ["stages"]


def placed(cluster: Cluster, layout: Layout, order: Order) -> Cluster:
    """The devices that a layout takes, in the order of its stages.

    Args:
        cluster: The machines.
        layout: Stages and replicas.
        order: How ranks are numbered, which are handed out machine by machine.
    """
    taken = cluster.taken(layout.devices)
    if order == "stages":
        return taken
    placement = Placement(layout.replicas, order)
    ranks = [placement.ranks(stage) for stage in range(placement.stages)]
    crossing = [len({taken.host_of[rank] for rank in of_stage}) > 1 for of_stage in ranks]
    return taken.renumbered([rank for of_stage in ranks for rank in of_stage], max(1, sum(crossing)))


def one_machine(cluster: Cluster) -> Cluster | None:
    """All devices as if they were in one machine: what a pipeline sees that has all of its stages in one.

    Returns:
        It; None where that is no other question.
    """
    first = cluster.hosts[0]
    if len(cluster.hosts) == 1 or first.devices == 1 or any(host != first for host in cluster.hosts):
        return None
    if first.inside.bandwidth <= first.network.bandwidth:
        return None
    return replace(cluster, hosts=(replace(first, devices=cluster.devices),), _memo={})


def one_of_equal(cluster: Cluster, replicas: tuple[int, ...], beside: int) -> Cluster:
    """The devices of the first of some equal pipelines beside each other, with its share of what they share."""
    if beside == 1:
        return cluster
    first = 0
    members: list[int] = []
    for count in replicas:
        members += range(first, first + count, beside)
        first += count
    machines = [cluster.host_of[member] for member in members]
    hosts: list[Host] = []
    for number in dict.fromkeys(machines):
        host = cluster.hosts[number]
        count = machines.count(number)
        hosts.append(replace(host, devices=count, shared=host.devices / count))
    by_machine = sorted(range(len(members)), key=lambda index: list(dict.fromkeys(machines)).index(machines[index]))
    numbering = [by_machine.index(index) for index in range(len(members))] if cluster.numbering else ()
    return replace(cluster, hosts=tuple(hosts), numbering=tuple(numbering), _memo={})


@dataclass(frozen=True)
class Place:
    """What is alike for stages at some places; a stage is an interval of the devices.

    Attributes:
        ring: The slowest connection between its own devices.
        port: The connection to its neighbours.
        shared_by: Most of its devices that share that port.
        speed: Of its slowest device.
        memory: Of the device that has least; infinite where unlimited.
    """

    ring: Link
    port: Link
    shared_by: int
    speed: float
    memory: float

    @property
    def worse(self) -> tuple[float, ...]:
        """Grows with every device that a stage takes more."""
        links = (-self.ring.bandwidth, self.ring.latency, -self.port.bandwidth, self.port.latency)
        return (*links, -self.speed, -self.memory, self.shared_by)


@functools.lru_cache(maxsize=16)
def places_of(cluster: Cluster) -> "Places":
    """The places of a cluster, worked out once."""
    return Places(cluster)


class Places:
    """The places of a cluster.

    With d devices given out, a stage takes the next ones. The more it takes, the worse is its place: it leaves its
    machine, and reaches slower ones.

    Args:
        cluster: Its devices are given out from the last to the first.

    Attributes:
        kinds: The kinds of places, each before those that are worse.
        reach: By kind and d, how many devices a stage has at most in a place of this kind; 0 where there is none.
        room: By d, the devices left in the same machine.
        transfer: By d, the connection that the next stage's messages take to what has been given out.
    """

    def __init__(self, cluster: Cluster) -> None:
        devices = cluster.devices
        found: dict[Place, dict[int, int]] = {}
        self.room = np.zeros(devices + 1, dtype=np.int64)
        self.transfer: list[Link | None] = [None] * (devices + 1)
        for given in range(devices):
            device = devices - 1 - given
            # Where it begins a machine, what it sends goes through the network.
            if given:
                self.transfer[given] = cluster.link(device, device + 1)
            for place, reach in _places(cluster, device):
                found.setdefault(place, {})[given] = reach
            host = cluster.host_of[device]
            self.room[given] = device - cluster.host_of.index(host) + 1
        self.kinds = sorted(found, key=lambda place: place.worse)
        self.reach: NDArray[np.int64] = np.zeros((len(self.kinds), devices + 1), dtype=np.int64)
        for kind, place in enumerate(self.kinds):
            for given, reach in found[place].items():
                self.reach[kind, given] = reach

    def kind(self, given: int, replicas: int) -> int:
        """The kind of place where a stage has so many devices."""
        return int(np.flatnonzero(self.reach[:, given] >= replicas)[0])


def _places(cluster: Cluster, device: int) -> Iterator[tuple[Place, int]]:
    """The places of stages whose last device this is, with the devices that they have at most."""
    number = cluster.host_of[device]
    host = cluster.hosts[number]
    first = cluster.host_of.index(number)
    ends_inside = device + 1 < cluster.devices and cluster.host_of[device + 1] == number
    is_last = device + 1 == cluster.devices
    reach = device - first + 1
    port = host.inside if ends_inside or is_last else host.network
    crossing = port is not host.inside
    speed, memory = host.speed, float("inf") if host.memory is None else float(host.memory)
    place = Place(host.inside, port, host.devices if crossing else 1, speed, memory)
    networks, insides, most = [host.network], [host.inside], host.devices
    for other in reversed(cluster.hosts[:number]):
        networks.append(other.network)
        insides.append(other.inside)
        most = max(most, other.devices)
        speed = min(speed, other.speed)
        memory = min(memory, float("inf") if other.memory is None else float(other.memory))
        network = slower(networks)
        further = Place(slower([network, *insides]) if most > 1 else network, network, most, speed, memory)
        if further != place:
            yield place, reach
            place = further
        reach += other.devices
    yield place, reach
