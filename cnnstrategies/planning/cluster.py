"""The cluster for which a plan is made: machines, their devices in order, and the connections between devices."""

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import HOST, is_now, renamed
from cnnstrategies.planning.costs import UNMEASURED, Link
from cnnstrategies.planning.devices import EXAMPLE, Device, read_devices
from cnnstrategies.quantities import size_in_bytes

# Default rate in bytes per second at which a parameter server adds up and applies gradients. A CPU core from about 2020
# reaches this rate.
SERVER_RATE = 1e9
# Default CPU time in seconds that the sender or the receiver spends on a message of a parameter server, of any size.
SERVER_MESSAGE = 5e-5
GBIT = 1e9 / 8  # Bytes per second of a connection with a rate of 1 Gbit/s.
# Default latencies in microseconds: `inside` between devices of a machine, and `interconnect` between machines.
DEFAULT_US = {"inside": 10.0, "interconnect": 50.0}


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        devices: Number of devices of the machine.
        interconnect: Connection to other machines. All devices of the machine share this connection.
        inside: Connection between two devices of the machine.
        speed: Speed of a device, as a multiple of the speed of the device on which the profile was measured.
        memory: Bytes of memory of each device; None if unlimited.
        price: Price of the whole machine for an hour, in any currency.
        unequal: The devices, if their speeds or memories differ. ``speed`` and ``memory`` then have no meaning.
    """

    devices: int
    interconnect: Link
    inside: Link
    speed: float = 1.0
    memory: int | None = None
    price: float = 0.0
    unequal: tuple[Device, ...] = ()

    @property
    def each(self) -> tuple[Device, ...]:
        """The devices of the machine, in order."""
        return self.unequal or (Device(self.speed, self.memory),) * self.devices


@dataclass(frozen=True)
class Cluster:
    """A group of machines. The devices are numbered machine by machine.

    Attributes:
        hosts: The machines, in the order of their devices' numbers.
        server_rate: Rate in bytes per second at which a parameter server adds up and applies gradients.
        server_message: CPU seconds that the sender and the receiver each spend on a message of a parameter server.
    """

    hosts: tuple[Host, ...]
    server_rate: float = SERVER_RATE
    server_message: float = SERVER_MESSAGE

    @staticmethod
    def flat(devices: int, link: Link) -> "Cluster":
        """Return a cluster in which each machine has one device, and in which all connections are equal."""
        return Cluster((Host(1, link, link),) * devices)

    @staticmethod
    def connected(devices: Sequence[Device], link: Link, machines: int = 1) -> "Cluster":
        """Return a cluster of the given devices, in which all connections are equal.

        Args:
            devices: The devices, in the order of their numbers.
            link: Connection between any two devices.
            machines: Number of machines, which have equal numbers of devices. It must divide the number of devices.
        """
        each = len(devices) // machines
        return Cluster(
            tuple(
                Host(each, link, link, unequal=tuple(devices[first : first + each]))
                for first in range(0, len(devices), each)
            )
        )

    @cached_property
    def devices(self) -> int:
        """Number of devices of all machines together."""
        return len(self.host_of)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """For each device, the index of the device's machine in ``hosts``."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.devices))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each device, as a multiple of the speed of the device on which the profile was measured."""
        return tuple(device.speed for host in self.hosts for device in host.each)

    @cached_property
    def memories(self) -> tuple[float, ...]:
        """Bytes of memory of each device, infinite if unlimited."""
        return tuple(inf if device.memory is None else device.memory for host in self.hosts for device in host.each)

    def link(self, device: int, peer: int) -> Link:
        """Return the connection between two devices."""
        first, second = self.hosts[self.host_of[device]], self.hosts[self.host_of[peer]]
        if self.host_of[device] == self.host_of[peer]:
            return first.inside
        return slower(first.interconnect, second.interconnect)

    def ring(self, first: int, count: int) -> Link:
        """Return the slowest connection between neighbours in a ring of devices with consecutive numbers.

        The connection from the last device to the first device is left out, because another connection of the ring is
        at least as slow.

        Args:
            first: First device of the ring.
            count: Number of devices in the ring, at least 2.
        """
        return slower(*(self.link(device, peer) for device, peer in itertools.pairwise(range(first, first + count))))


@functools.lru_cache(maxsize=1024)
def slower(*links: Link) -> Link:
    """Return a connection with the smallest bandwidth, and the longest time of each kind, of all ``links``."""
    return Link(
        min(link.bandwidth for link in links),
        max(link.latency for link in links),
        max(link.work for link in links),
        max(link.sum for link in links),
        max(link.exchange for link in links),
    )


def read_cluster(file: Path, devices: int | None = None, backend: str = "nccl") -> Cluster:
    """Return the cluster that a YAML file describes.

    Args:
        file: File with the list ``nodes`` and, optionally, the mapping ``server``.
        devices: Number of devices that the cluster must have; None if any number is accepted.
        backend: Backend of torch.distributed, whose prices of sums and exchanges are used where the file has none.

    Raises:
        ConfigurationError: The file cannot be read, or it contains a value that is not accepted.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file}: the file is not valid YAML: {' '.join(str(error).split())}") from error
    known: dict[str, Read] = {"nodes": functools.partial(_nodes, UNMEASURED[backend]), "server": _server}
    settings = _mapping(f"{file}: ", content, known)
    if "nodes" not in settings:
        _refuse(
            f"{file}: ",
            "nodes is missing; give a list of machines, such as `nodes: [{count: 4, interconnect: {gbit: 10}}]`",
        )
    cluster = Cluster(tuple(settings["nodes"]), **settings.get("server", {}))
    if devices is not None and cluster.devices != devices:
        _refuse(
            f"{file}: nodes: ",
            f"the machines have {cluster.devices} devices, but trainer.devices x trainer.num_nodes is {devices}; "
            "make the two numbers equal",
        )
    return cluster


# A function that checks and converts a value of the file. Its first argument is the beginning of every error message,
# which names the file and the value's key. Its second argument is the value.
Read = Callable[[str, Any], Any]


def _refuse(where: str, reason: str) -> NoReturn:
    raise ConfigurationError(f"{where}{reason}")


def _mapping(where: str, content: Any, known: Mapping[str, Read]) -> dict[str, Any]:
    if not isinstance(content, dict):
        _refuse(where, f"give a mapping; the possible keys are {', '.join(known)}")
    values = {}
    for name, value in content.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            _refuse(where, f"unknown key {name!r}{hint} use one of: {', '.join(known)}")
        values[name] = known[name](f"{where}{name}: ", value)
    return values


def _nodes(prices: tuple[float, float], where: str, content: Any) -> list[Host]:
    if not isinstance(content, list) or not content:
        _refuse(where, "give a list of at least one machine")
    return [
        host
        for index, item in enumerate(content)
        for host in _hosts(prices, f"{where.removesuffix(': ')}[{index}]: ", item)
    ]


def _hosts(prices: tuple[float, float], where: str, content: Any) -> list[Host]:
    known: dict[str, Read] = {
        "count": _count,
        "devices": _devices,
        "speed": _number(above=0.0),
        "memory": _size,
        "price": _number(least=0.0),
        "inside": functools.partial(_link, DEFAULT_US["inside"], prices),
        "interconnect": functools.partial(_link, DEFAULT_US["interconnect"], prices),
    }
    for name in content if isinstance(content, dict) else ():
        if (new := renamed(HOST, name)) is not None:
            _refuse(where, is_now(name, new))
    settings = {"devices": 1, **_mapping(where, content, known)}
    if isinstance(settings["devices"], tuple):
        for name in settings.keys() & {"speed", "memory"}:
            _refuse(
                where,
                f"{name}: devices already gives each device its {name}; leave {name} out, or make devices a number",
            )
        settings |= {"unequal": settings["devices"], "devices": len(settings["devices"])}
    if "interconnect" not in settings and "inside" not in settings:
        _refuse(
            where, "`interconnect` is missing; give the connection between the machines, such as `{gbit: 10, us: 50}`"
        )
    if settings["devices"] > 1 and "inside" not in settings:
        _refuse(
            where,
            f"`inside` is missing; give the connection between the machine's {settings['devices']} devices, "
            "such as `{gbit: 96}`",
        )
    settings.setdefault("interconnect", settings.get("inside"))
    settings.setdefault("inside", settings["interconnect"])
    count = settings.pop("count", 1)
    return [Host(**settings)] * count


def _link(us: float, prices: tuple[float, float], where: str, content: Any) -> Link:
    known = {
        "gbit": _number(above=0.0),
        "us": _number(least=0.0),
        "work_us": _number(least=0.0),
        "sum_us": _number(least=0.0),
        "exchange_us": _number(least=0.0),
        "efficiency": _number(above=0.0, most=1.0),
    }
    settings = _mapping(where, content, known)
    if "gbit" not in settings:
        _refuse(where, "gbit is missing; give the rate of large messages in Gbit/s")
    bandwidth = settings["gbit"] * GBIT * settings.get("efficiency", 1.0)
    defaults = {"us": us, "work_us": 0.0, "sum_us": 1e6 * prices[0], "exchange_us": 1e6 * prices[1]}
    return Link(bandwidth, *(settings.get(name, default) * 1e-6 for name, default in defaults.items()))


def _server(where: str, content: Any) -> dict[str, float]:
    settings = _mapping(where, content, {"gbyte_per_s": _number(above=0.0), "us": _number(least=0.0)})
    names = {"gbyte_per_s": ("server_rate", 1e9), "us": ("server_message", 1e-6)}
    return {names[key][0]: value * names[key][1] for key, value in settings.items()}


def _number(least: float = float("-inf"), above: float = float("-inf"), most: float = float("inf")) -> Read:
    bounds = {"of at least": least, "above": above, "of at most": most}
    expected = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if abs(bound) < float("inf"))

    def read(where: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not (least <= number <= most and above < number < float("inf")):
            _refuse(where, f"{value!r} is not accepted; it must be a number {expected}")
        return number

    return read


def _count(where: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        _refuse(where, f"{value!r} is not accepted; it must be a whole number of at least 1")
    return value


def _devices(where: str, value: Any) -> int | tuple[Device, ...]:
    """Return a number of equal devices, or the devices that a text such as ``1x24GiB@1.0, 2x8GiB@0.4`` describes."""
    if isinstance(value, str):
        return read_devices(value, where.removesuffix(": "))
    if type(value) is not int or value < 1:
        _refuse(where, f"{value!r} is not accepted; it must be a whole number of at least 1, or a text as {EXAMPLE!r}")
    return value


def _size(where: str, value: Any) -> int:
    """Convert a size with a unit, such as 16 GiB, to a number of bytes.

    Raises:
        ConfigurationError: The value is not a size.
    """
    size: int = size_in_bytes(value, where.removesuffix(": "))
    return size
