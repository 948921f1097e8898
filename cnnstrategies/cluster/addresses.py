"""Network interfaces of this machine, and the interface that leads to another host."""

import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.errors import ConfigurationError

SIOCGIFADDR = 0x8915  # linux/sockios.h
IPV6_TABLE = Path("/proc/net/if_inet6")
DISCARD = 9  # A question for a route needs a port; nothing is sent to it.


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine.

    Attributes:
        name: Name, such as ``eth0``.
        address: First IP address, which gloo announces to the other ranks.
    """

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Return the interfaces that have an address; an interface with IPv4 and IPv6 appears twice, first with IPv4."""
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


def resolve(host: str) -> str:
    """Return the IP address of a host name, as this machine resolves it.

    Raises:
        ConfigurationError: This machine cannot resolve the name.
    """
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigurationError(
            f"{socket.gethostname()} cannot resolve the host name {host!r} ({error.strerror}): add it to /etc/hosts on "
            "every machine, or give the address itself, for example MASTER_ADDR=10.0.0.1"
        ) from error
    return str(address)


def source_address(target: str) -> str:
    """Return the address of this machine from which packets to ``target`` leave, by the kernel's routes.

    Raises:
        ConfigurationError: The kernel has no route to ``target``.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, DISCARD))  # A datagram socket only looks up the route.
        except OSError as error:
            raise ConfigurationError(
                f"{socket.gethostname()} has no route to {target} ({error.strerror}): is its network up? `ip route get "
                f"{target}` shows what the kernel would do"
            ) from error
        return str(probe.getsockname()[0])


def interface_to(target: str) -> Interface:
    """Return the interface that leads to ``target`` by the kernel's routes.

    Raises:
        ConfigurationError: There is no route, or the route's address is not the first address of an interface.
    """
    source = source_address(target)
    for interface in interfaces():
        if interface.address == source:
            return interface
    if ipaddress.ip_address(source).is_loopback:
        return next(interface for interface in interfaces() if interface.name == "lo")
    raise ConfigurationError(
        f"packets to {target} leave from {source}, which is not the first address of an interface (there are "
        f"{_listed()}): name one with --interconnect.interface"
    )


def find_interface(wanted: str) -> Interface:
    """Return the interface with a name, ``eth0``, or with an address in a subnet, ``10.0.0.0/24``.

    Raises:
        ConfigurationError: This machine has no such interface, or the text is not a subnet.
    """
    try:
        subnet = ipaddress.ip_network(wanted, strict=False) if "/" in wanted else None
    except ValueError as error:
        raise ConfigurationError(
            f"interconnect.interface: {wanted!r} is not a subnet ({error}); 10.0.0.0/24 is an example"
        ) from error
    for interface in interfaces():
        if interface.name == wanted or (subnet and ipaddress.ip_address(interface.address) in subnet):
            return interface
    raise ConfigurationError(f"interconnect.interface: {socket.gethostname()} has no {wanted!r}; it has {_listed()}")


def choose_interface(wanted: str | None, target: str) -> Interface:
    """Return the interface for the traffic between the ranks.

    The order of choice is ``wanted``, the variables of gloo and NCCL, and the route to ``target``.
    """
    wanted = wanted or os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return find_interface(wanted) if wanted else interface_to(target)


def use_interface(name: str) -> None:
    """Make gloo and NCCL use an interface, in this process and in processes that it starts.

    Variables that are already set are kept.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)


def _listed() -> str:
    return ", ".join(f"{interface.name} ({interface.address})" for interface in interfaces()) or "none"


def free_port() -> int:
    """Return a TCP port on which nothing listens at the moment."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])
