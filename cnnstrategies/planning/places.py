"""Where the devices of a stage are, in a search that gives them out from the last stage to the first."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cnnstrategies.planning.cluster import Cluster, slower
from cnnstrategies.planning.costs import Link


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
