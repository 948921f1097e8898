"""The machines that a plan is made for: devices in order, and what they are connected by."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.yaml_lines import Value, count, number, one_of, size

AllReduce = Literal["flat", "two_level"]
ALL_REDUCE: tuple[AllReduce, ...] = ("flat", "two_level")
SERVER_RATE = 1e9  # bytes of gradients per second that a server adds up and applies; a core of about 2020
SERVER_MESSAGE = 5e-5  # seconds of a processor for a message of a parameter server, whatever its size
GBIT = 1e9 / 8  # bytes per second
DEFAULT_US = {"inside": 10.0, "network": 50.0}


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        devices: How many it has.
        network: To the other machines; its devices share it.
        inside: Between two of its devices; the network where it is left out.
        speed: Of a device, as a multiple of the one that the profile was taken on.
        memory: Bytes of a device; unlimited when None.
        price: Of the whole machine, for an hour.
        shared: How often its network has to carry what one message brings: there are others beside it, alike.
    """

    devices: int
    network: Link
    inside: Link
    speed: float = 1.0
    memory: int | None = None
    price: float = 0.0
    shared: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Machines in the order in which their devices are numbered.

    Attributes:
        hosts: The machines.
        all_reduce: ``flat``, one ring through all devices, as torch's backends have it, or ``two_level``, rings inside
            the machines and one between them.
        server_rate: Bytes of gradients per second that a parameter server adds up and applies.
        server_message: Seconds that each message of it costs who sends or receives it.
        numbering: Which device each rank has, in the order of the machines; all in this order when empty.
        rings: Where ranks are numbered otherwise, how many all-reduces cross the same connections at once.
    """

    hosts: tuple[Host, ...]
    all_reduce: AllReduce = "flat"
    server_rate: float = SERVER_RATE
    server_message: float = SERVER_MESSAGE
    numbering: tuple[int, ...] = ()
    rings: int = 1
    _memo: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def flat(devices: int, link: Link) -> "Cluster":
        """Equal devices with the same connection between any two, as if each were a machine."""
        return Cluster((Host(1, link, link),) * devices)

    @cached_property
    def devices(self) -> int:
        """Devices of all machines."""
        return sum(host.devices for host in self.hosts)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The machine of each device."""
        of_devices = tuple(index for index, host in enumerate(self.hosts) for _ in range(host.devices))
        return tuple(of_devices[device] for device in self.numbering) if self.numbering else of_devices

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each device."""
        return tuple(self.hosts[host].speed for host in self.host_of)

    @cached_property
    def memory(self) -> int | None:
        """Bytes of the device that has least."""
        return min((host.memory for host in self.hosts if host.memory is not None), default=None)

    def link(self, one: int, other: int) -> Link:
        """The connection between two devices."""
        return self._between(self.host_of[one], self.host_of[other])

    def ring(self, first: int, count: int) -> Link:
        """The slowest connection of a ring through devices that are numbered one after another, at least two."""
        key = ("ring", first, count)
        if key not in self._memo:
            hosts = self.host_of[first : first + count]
            pairs = {(one, other) for one, other in itertools.pairwise(hosts)}
            self._memo[key] = slower([self._between(*pair) for pair in sorted(pairs)])
        link: Link = self._memo[key]
        return link

    def _between(self, one: int, other: int) -> Link:
        key = ("link", one, other)
        if key not in self._memo:
            hosts = self.hosts[one], self.hosts[other]
            self._memo[key] = hosts[0].inside if one == other else slower([host.network for host in hosts])
        link: Link = self._memo[key]
        return link

    def taken(self, devices: int) -> "Cluster":
        """Only its last devices, which is where a search that begins with the last stage begins."""
        if devices == self.devices:
            return self
        key = ("taken", devices)
        if key not in self._memo:
            hosts: list[Host] = []
            for host in reversed(self.hosts):
                count = min(host.devices, devices)
                devices -= count
                if count:
                    hosts.insert(0, replace(host, devices=count))
            self._memo[key] = replace(self, hosts=tuple(hosts), _memo={})
        cluster: Cluster = self._memo[key]
        return cluster

    def renumbered(self, numbering: Sequence[int], rings: int) -> "Cluster":
        """The same with ranks on other devices; see the attributes."""
        return replace(self, numbering=tuple(numbering), rings=rings, _memo={})

    def with_network(self, factor: float) -> "Cluster":
        """The same with another rate between the machines."""
        hosts = tuple(replace(host, network=host.network.scaled(factor)) for host in self.hosts)
        return replace(self, hosts=hosts, _memo={})


def slower(links: Sequence[Link]) -> Link:
    """The connection with the least bandwidth, with the greatest latency and work of all."""
    slowest = min(links, key=lambda link: link.bandwidth)
    return replace(slowest, latency=max(link.latency for link in links), work=max(link.work for link in links))


def read_cluster(file: Path, devices: int | None = None) -> Cluster:
    """The cluster that a file describes.

    Args:
        file: With ``nodes``, a list; and, if wished, ``all_reduce`` and ``server``.
        devices: How many it must have, where a configuration says so too.

    Raises:
        ConfigurationError: A key is unknown, a number impossible, or something needed is missing; the message has the
            file, the line and what is accepted.
    """
    root = Value.load(file)
    found = root.mapping(
        {
            "nodes": lambda value: [host for item in value.items() for host in _hosts(item)],
            "all_reduce": one_of(*ALL_REDUCE),
            "server": lambda value: value.mapping({"gbyte_per_s": number(0.0, above=True), "us": number(0.0)}),
        }
    )
    if "nodes" not in found:
        root.refuse("nodes is missing, a list of machines such as {count: 4, devices: 4, network: {gbit: 10}}")
    options: dict[str, Any] = {"all_reduce": found.get("all_reduce", "flat")}
    server = found.get("server") or {}
    if "gbyte_per_s" in server:
        options["server_rate"] = server["gbyte_per_s"] * 1e9
    if "us" in server:
        options["server_message"] = server["us"] * 1e-6
    cluster = Cluster(tuple(found["nodes"]), **options)
    if devices is not None and cluster.devices != devices:
        value = next(value for key, value in root.pairs() if key.text == "nodes")
        value.refuse(
            f"they have {cluster.devices} devices, but trainer.devices x trainer.num_nodes are {devices}: "
            "give both the same"
        )
    return cluster


def _hosts(item: Value) -> list[Host]:
    found = item.mapping(
        {
            "count": count,
            "devices": count,
            "speed": number(0.0, above=True),
            "memory": size,
            "price": number(0.0),
            "inside": lambda value: _link(value, "inside"),
            "network": lambda value: _link(value, "network"),
        }
    )
    number_of_hosts = found.pop("count", 1)
    found.setdefault("devices", 1)
    if "network" not in found and "inside" not in found:
        item.refuse("network is missing, how machines are connected, such as {gbit: 10, us: 50}")
    if found["devices"] > 1 and "inside" not in found:
        item.refuse(f"inside is missing, how its {found['devices']} devices are connected, such as {{gbit: 96}}")
    found.setdefault("network", found.get("inside"))
    found.setdefault("inside", found["network"])
    return [Host(**found)] * number_of_hosts


def _link(value: Value, kind: str) -> Link:
    found = value.mapping(
        {
            "gbit": number(0.0, above=True),
            "us": number(0.0),
            "work_us": number(0.0),
            "efficiency": number(0.0, above=True, most=1.0),
            "rates": _rates,
        }
    )
    efficiency = found.get("efficiency", 1.0)
    rates = tuple((bytes_, rate * efficiency) for bytes_, rate in found.get("rates", ()))
    if "gbit" not in found and not rates:
        value.refuse("gbit is missing, the rate of large messages in Gbit/s; or rates, by size")
    bandwidth = found["gbit"] * GBIT * efficiency if "gbit" in found else rates[-1][1]
    return Link(bandwidth, found.get("us", DEFAULT_US[kind]) * 1e-6, rates, found.get("work_us", 0.0) * 1e-6)


def _rates(value: Value) -> list[tuple[int, float]]:
    read = number(0.0, above=True)
    rates = [(size(key), read(rate) * GBIT) for key, rate in value.pairs()]
    if not rates or any(left[0] >= right[0] for left, right in itertools.pairwise(rates)):
        value.refuse("sizes of messages, ascending, with Gbit/s are accepted, such as {64KiB: 2, 1MiB: 7}")
    return rates
