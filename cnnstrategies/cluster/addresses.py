"""Network interfaces of this machine, and choice of the interface for the traffic between the ranks."""

import fcntl
import ipaddress
import os
import socket
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError

SIOCGIFADDR = 0x8915  # This constant is from linux/sockios.h.
IPV6_TABLE = Path("/proc/net/if_inet6")
FIRST_PORT, PORTS = 20000, 10000  # First port, and number of ports, that may follow from the id of a launch.
DISCARD = 9  # Arbitrary port for looking up a route. Nothing is sent to it.


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine.

    Attributes:
        name: Name of the interface, such as ``eth0``.
        address: First IP address of the interface, which gloo announces to the other ranks.
    """

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the interfaces that have an IP address.

    An interface with IPv4 and IPv6 addresses is listed twice. All IPv4 addresses come before the IPv6 addresses.
    """
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # The interface has no IPv4 address.
            result.append(Interface(name, socket.inet_ntoa(answer[20:24])))
    if IPV6_TABLE.exists():
        for line in IPV6_TABLE.read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            result.append(Interface(name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return result


def main_port_of(environ: Mapping[str, str]) -> int | None:
    """Return the value of ``MASTER_PORT``. Return None if the variable is not set.

    Raises:
        ConfigurationError: The value is not a port.
    """
    text = environ.get("MASTER_PORT")
    if text is None:
        return None
    if text.isascii() and text.isdigit() and 0 < int(text) < 2**16:
        return int(text)
    remedy = "set it to a free port of the machine of rank 0, such as 29500, or unset it"
    if "://" in text:
        remedy = (
            'Kubernetes sets it in the pods of a namespace with a service called "master": set enableServiceLinks: '
            "false for the pods, or set MASTER_PORT to a port such as 29500"
        )
    raise ConfigurationError(f"MASTER_PORT={text!r} is not a port from 1 to 65535: {remedy}")


def launch_port(launch: str) -> int:
    """Return a port below the ephemeral ports that follows from the id of a launch.

    Args:
        launch: A text that is equal on all ranks of a run, and usually different in other runs on the same machine.
    """
    return FIRST_PORT + zlib.crc32(launch.encode()) % PORTS


def resolve(host: str) -> str:
    """Resolve a host name to an IP address.

    Raises:
        ConfigurationError: This machine cannot resolve the name.
    """
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot resolve the host name {host!r} ({error.strerror}): add it to /etc/hosts on "
            "every machine, or use an IP address instead, for example MASTER_ADDR=10.0.0.1"
        ) from error
    return str(address)


def source_address(target: str) -> str:
    """Return the IP address of this machine from which the kernel sends packets to ``target``.

    Raises:
        ConfigurationError: The kernel has no route to ``target``.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, DISCARD))  # For a UDP socket, this call only looks up the route.
        except OSError as error:
            raise ConfigurationError(
                f"{socket.gethostname()} has no route to {target} ({error.strerror}): check the network with `ip route "
                f"get {target}`"
            ) from error
        return str(probe.getsockname()[0])


def interface_to(target: str) -> Interface:
    """Return the interface through which the kernel sends packets to ``target``.

    Raises:
        ConfigurationError: The kernel has no route to ``target``, or no interface has the source address of the route
            as its first address.
    """
    source = source_address(target)
    for interface in interfaces():
        if interface.address == source:
            return interface
    if ipaddress.ip_address(source).is_loopback:
        return next(interface for interface in interfaces() if interface.name == "lo")
    raise ConfigurationError(
        f"packets to {target} are sent from {source}, which is not the first address of an interface (this machine has "
        f"{_listed()}): set --interconnect.interface"
    )


def find_interface(wanted: str) -> Interface:
    """Return an interface by its name or its subnet.

    Args:
        wanted: Name of the interface, such as ``eth0``, or a subnet that contains its address, such as ``10.0.0.0/24``.

    Raises:
        ConfigurationError: This machine has no such interface, or ``wanted`` has a slash but is not a valid subnet.
    """
    try:
        subnet = ipaddress.ip_network(wanted, strict=False) if "/" in wanted else None
    except ValueError as error:
        raise ConfigurationError(
            f"interconnect.interface: {wanted!r} is not a subnet ({error}); write a subnet such as 10.0.0.0/24"
        ) from error
    for interface in interfaces():
        if interface.name == wanted or (subnet and ipaddress.ip_address(interface.address) in subnet):
            return interface
    raise ConfigurationError(
        f"interconnect.interface: {socket.gethostname()} has no interface {wanted!r}; use one of {_listed()}"
    )


def choose_interface(wanted: str | None, target: str) -> Interface:
    """Return the interface for the traffic between the ranks.

    This is ``wanted``, if it is set. Otherwise it is the interface that ``GLOO_SOCKET_IFNAME`` or
    ``NCCL_SOCKET_IFNAME`` names. If none of these is set, it is the interface on the route to ``target``.
    """
    wanted = wanted or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return find_interface(wanted) if wanted else interface_to(target)


def use_interface(name: str) -> None:
    """Make gloo and NCCL use an interface, in this process and in its child processes.

    The function sets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``, unless they are already set.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def _listed() -> str:
    return ", ".join(f"{interface.name} ({interface.address})" for interface in interfaces()) or "none"


def free_port() -> int:
    """Return a TCP port that is currently free on this machine."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
