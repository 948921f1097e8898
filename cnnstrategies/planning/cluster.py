"""The machines that a plan is made for: devices in order, and what they are connected by."""

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import HOST, is_now, renamed
from cnnstrategies.planning.costs import Link
from cnnstrategies.quantities import size_in_bytes

SERVER_RATE = 1e9  # bytes of gradients per second that a server adds up and applies; a core of about 2020
SERVER_MESSAGE = 5e-5  # seconds of a processor for a message of a parameter server, whatever its size
GBIT = 1e9 / 8  # bytes per second
DEFAULT_US = {"inside": 10.0, "interconnect": 50.0}


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        interconnect: Connection to the other machines; the devices of this machine share it.
        inside: Connection between two of its devices; equal to ``interconnect`` where it is left out.
        speed: Of a device, as a multiple of the one that the profile was taken on.
        memory: Bytes of a device; unlimited when None.
        price: Of the whole machine, for an hour.
    """

    devices: int
    interconnect: Link
    inside: Link
    speed: float = 1.0
    memory: int | None = None
    price: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Machines in the order in which their devices are numbered.

    Attributes:
        server_rate: Bytes of gradients per second that a parameter server adds up and applies.
        server_message: Seconds that each message of it costs who sends or receives it.
    """

    hosts: tuple[Host, ...]
    server_rate: float = SERVER_RATE
    server_message: float = SERVER_MESSAGE

    @staticmethod
    def flat(devices: int, link: Link) -> "Cluster":
        """Equal devices with the same connection between any two, as if each were a machine."""
        return Cluster((Host(1, link, link),) * devices)

    @cached_property
    def devices(self) -> int:
        """Devices of all machines."""
        return len(self.host_of)

    @cached_property
    def host_of(self) -> tuple[int, ...]:
        """The machine of each device."""
        return tuple(index for index, host in enumerate(self.hosts) for _ in range(host.devices))

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
        first, second = self.hosts[self.host_of[one]], self.hosts[self.host_of[other]]
        return (
            first.inside
            if self.host_of[one] == self.host_of[other]
            else slower(first.interconnect, second.interconnect)
        )

    def ring(self, first: int, count: int) -> Link:
        """The slowest connection of a ring through devices that are numbered one after another, at least two."""
        return slower(*(self.link(one, other) for one, other in itertools.pairwise(range(first, first + count))))


@functools.lru_cache(maxsize=1024)
def slower(*links: Link) -> Link:
    """The connection with the least bandwidth, with the greatest latency and work of all."""
    return Link(
        min(link.bandwidth for link in links), max(link.latency for link in links), max(link.work for link in links)
    )


def read_cluster(file: Path, devices: int | None = None) -> Cluster:
    """The cluster that a file describes.

    Args:
        file: With ``nodes``, a list; and, if wished, ``server``.
        devices: How many it must have, where a configuration says so too.
    """
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{file}: this is not YAML: {' '.join(str(error).split())}") from error
    found = _mapping(f"{file}: ", given, {"nodes": _nodes, "server": _server})
    if "nodes" not in found:
        _refuse(
            f"{file}: ", "nodes is missing, a list of machines such as {count: 4, devices: 4, interconnect: {gbit: 10}}"
        )
    cluster = Cluster(tuple(found["nodes"]), **found.get("server", {}))
    if devices is not None and cluster.devices != devices:
        _refuse(
            f"{file}: nodes: ",
            f"they have {cluster.devices} devices, but trainer.devices x trainer.num_nodes are {devices}: "
            "give both the same",
        )
    return cluster


# Reads a value: where it is, and the value.
Read = Callable[[str, Any], Any]


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigurationError(f"{where}{why}")


def _mapping(where: str, given: Any, known: Mapping[str, Read]) -> dict[str, Any]:
    if not isinstance(given, dict):
        _refuse(where, f"a mapping is needed, with some of {', '.join(known)}")
    found = {}
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            _refuse(where, f"unknown key {name!r}{hint} accepted: {', '.join(known)}")
        found[name] = known[name](f"{where}{name}: ", value)
    return found


def _nodes(where: str, given: Any) -> list[Host]:
    if not isinstance(given, list) or not given:
        _refuse(where, "a list is needed, with at least one machine")
    return [host for index, item in enumerate(given) for host in _hosts(f"{where.removesuffix(': ')}[{index}]: ", item)]


def _hosts(where: str, given: Any) -> list[Host]:
    known: dict[str, Read] = {
        "count": _count,
        "devices": _count,
        "speed": _number(above=0.0),
        "memory": _size,
        "price": _number(least=0.0),
        "inside": functools.partial(_link, DEFAULT_US["inside"]),
        "interconnect": functools.partial(_link, DEFAULT_US["interconnect"]),
    }
    for name in given if isinstance(given, dict) else ():
        if (new := renamed(HOST, name)) is not None:
            _refuse(where, is_now(name, new))
    found = {"devices": 1, **_mapping(where, given, known)}
    if "interconnect" not in found and "inside" not in found:
        _refuse(where, "interconnect is missing, how machines are connected, such as {gbit: 10, us: 50}")
    if found["devices"] > 1 and "inside" not in found:
        _refuse(where, f"inside is missing, how its {found['devices']} devices are connected, such as {{gbit: 96}}")
    found.setdefault("interconnect", found.get("inside"))
    found.setdefault("inside", found["interconnect"])
    count = found.pop("count", 1)
    return [Host(**found)] * count


def _link(us: float, where: str, given: Any) -> Link:
    known = {
        "gbit": _number(above=0.0),
        "us": _number(least=0.0),
        "work_us": _number(least=0.0),
        "efficiency": _number(above=0.0, most=1.0),
    }
    found = _mapping(where, given, known)
    if "gbit" not in found:
        _refuse(where, "gbit is missing, the rate of large messages in Gbit/s")
    bandwidth = found["gbit"] * GBIT * found.get("efficiency", 1.0)
    return Link(bandwidth, found.get("us", us) * 1e-6, found.get("work_us", 0.0) * 1e-6)


def _server(where: str, given: Any) -> dict[str, float]:
    found = _mapping(where, given, {"gbyte_per_s": _number(above=0.0), "us": _number(least=0.0)})
    names = {"gbyte_per_s": ("server_rate", 1e9), "us": ("server_message", 1e-6)}
    return {names[key][0]: value * names[key][1] for key, value in found.items()}


def _number(least: float = float("-inf"), above: float = float("-inf"), most: float = float("inf")) -> Read:
    bounds = {"of at least": least, "above": above, "of at most": most}
    expected = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if abs(bound) < float("inf"))

    def read(where: str, given: Any) -> float:
        try:
            number = float(given)
        except (TypeError, ValueError):
            number = float("nan")
        if not (least <= number <= most and above < number < float("inf")):
            _refuse(where, f"{given!r} is not accepted; it must be a number {expected}")
        return number

    return read


def _count(where: str, given: Any) -> int:
    if type(given) is not int or given < 1:
        _refuse(where, f"{given!r} is not accepted; it must be a whole number of at least 1")
    return given


def _size(where: str, given: Any) -> int:
    """Return a size in bytes."""
    size: int = size_in_bytes(given, where.removesuffix(": "))
    return size
