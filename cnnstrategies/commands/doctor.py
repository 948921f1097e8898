"""``cnnstrategies doctor``: check the machines of a cluster, and print tables, problems and remedies."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cnnstrategies.cluster.devices import MeasuredDevice, relative_speeds
from cnnstrategies.cluster.doctor import HostReport, examine, examine_alone
from cnnstrategies.cluster.environment import find_place
from cnnstrategies.cluster.launchers import start_programs
from cnnstrategies.commands.arguments.options import DoctorOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.costs import digits, format_bytes
from cnnstrategies.planning.devices import described
from cnnstrategies.quantities import seconds


def main(options: DoctorOptions) -> None:
    """Check all hosts of a launched job, or only this host.

    Exit with code 0 if there are no problems, and otherwise with code 1.
    """
    place = find_place()
    if place is not None and place.local_rank != 0:
        return
    directory = options.shared.absolute()
    wait = seconds(options.wait, "--wait")
    if place is None or place.nodes == 1:
        hosts: list[HostReport] | None = [examine_alone()]
    else:
        try:
            hosts = examine(place, directory, options.interface, wait)
        except (ConfigurationError, OSError) as error:
            print(f"problem: {error}", file=sys.stderr)
            sys.exit(1)
    if hosts is None:
        return
    alone = len(hosts) == 1
    tables = (versions_table, devices_table) if alone else (hosts_table, versions_table, devices_table, links_table)
    for table in tables:
        Console().print(table(hosts))
    problems = list(problems_of(hosts))
    for problem in problems:
        print(f"problem: {problem}")
    if alone:
        print(
            "Only this machine was checked. To check several machines, start doctor with the launcher that will start "
            f"the training ({start_programs()}), one process on each machine; docs/doctor.md has the commands"
        )
    elif not problems:
        print(f"No problems: all {len(hosts)} hosts have the same versions, reach each other and share {directory}")
    for line in costs_of_messages(hosts):
        print(line)
    print(f'To plan for these devices: cnnstrategies plan --config YOURS --have "{owned(hosts)}"')
    sys.exit(1 if problems else 0)


def hosts_table(hosts: Sequence[HostReport]) -> Table:
    """Return a table of the hosts, with the addresses and the network interface of each host."""
    table = Table("host", "address", "interface", title="Hosts", title_justify="left")
    for node, host in enumerate(hosts):
        table.add_row(f"{node} {host.name}", host.address, host.interface)
    return table


def versions_table(hosts: Sequence[HostReport]) -> Table:
    """Return a table of the installed versions, with the names of the hosts that have each version."""
    table = Table("program", "version", "on", title="Versions", title_justify="left")
    for program, names in by_version(hosts).items():
        for version, on in names.items():
            table.add_row(program, version, "all" if len(names) == 1 else ", ".join(on))
    return table


def devices_table(hosts: Sequence[HostReport]) -> Table:
    """Return a table of the devices. Speeds are multiples of the speed of the first host's first device."""
    table = Table("host", "device", "memory", "speed", title="Devices", title_justify="left")
    (_, _, first), *_ = hosts[0].devices
    for host in hosts:
        for name, memory, rate in host.devices:
            table.add_row(host.name, name, format_bytes(memory), f"{rate / first:.2f}")
    return table


def owned(hosts: Sequence[HostReport]) -> str:
    """Return the devices of all hosts as a value of ``plan --have``."""
    devices = [MeasuredDevice(*device) for host in hosts for device in host.devices]
    return described(relative_speeds(devices))


def links_table(hosts: Sequence[HostReport]) -> Table:
    """Return a table of the measured connections between hosts, with one row for each direction."""
    table = Table("from", "to", "round trip, ms", "Mbit/s", title="Connections", title_justify="left")
    for host in hosts:
        for node, round_trip, bandwidth in sorted(host.links):
            table.add_row(host.name, hosts[node].name, f"{1e3 * round_trip:.2f}", f"{8e-6 * bandwidth:,.0f}")
    return table


def costs_of_messages(hosts: Sequence[HostReport]) -> list[str]:
    """Return lines about the cost of messages over the slowest connections; none if no connection was measured."""
    links = [(round_trip, bandwidth) for host in hosts for _, round_trip, bandwidth in host.links]
    if not links:
        return []
    latency, bandwidth = 1e3 * max(links)[0] / 2, 8e-6 * min(bandwidth for _, bandwidth in links)
    measured, options = [], ""
    if hosts[0].prices:
        total, exchange = (digits(1e3 * seconds) for seconds in hosts[0].prices)
        measured = [
            f"Between computations of a step, a sum over {hosts[0].name} and {hosts[1].name} takes {total} ms by gloo, "
            f"and an exchange of small messages takes {exchange} ms"
        ]
        options = f" --sum_latency {total} --exchange_latency {exchange}"
    return [
        f"A message between hosts takes at least {digits(latency)} ms. Under spatial with parts of an image on several "
        f"hosts, a step waits for messages in most layers, in forward and backward: 100 of them take at least "
        f"{digits(100 * latency)} ms",
        *measured,
        f"To plan over these connections: cnnstrategies plan --config YOURS --bandwidth {bandwidth:.0f} --latency "
        f"{digits(latency)}{options}",
    ]


def by_version(hosts: Sequence[HostReport]) -> dict[str, dict[str, list[str]]]:
    """Return, for each program and each of its installed versions, the names of the hosts that have this version."""
    hosts_by_version: dict[str, dict[str, list[str]]] = {}
    for host in hosts:
        for program, version in host.versions.items():
            hosts_by_version.setdefault(program, {}).setdefault(version, []).append(host.name)
    return hosts_by_version


def problems_of(hosts: Sequence[HostReport]) -> Iterator[str]:
    """Yield one line of text for each problem of the hosts, with the remedy."""
    for program, names in by_version(hosts).items():
        if len(names) > 1:
            listed = ", ".join(f"{version} on {', '.join(on)}" for version, on in names.items())
            yield (
                f"{program} differs: {listed}: install the same version on all hosts, for example in a shared "
                "environment"
            )
    for host in hosts:
        for problem in host.problems:
            yield f"{host.name}: {problem}"
