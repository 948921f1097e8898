"""``cnnstrategies doctor``: check a cluster before training on it, and print tables and what to mend."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from cnnstrategies.cluster.doctor import Report, examine, examine_alone
from cnnstrategies.cluster.environment import find_place
from cnnstrategies.cluster.stores import own_store
from cnnstrategies.commands.front.options import doctor_parser
from cnnstrategies.errors import ConfigurationError

CLOCK_SECONDS = 1.0  # of difference are told
SHARED_MEMORY = 2**28  # bytes; a container has a quarter of it unless it is told otherwise


def main(args: Sequence[str]) -> None:
    """Check the hosts, or this one alone, and exit with 0 if all is well, else with 1."""
    options = doctor_parser().parse_args(args[1:])
    place = find_place()
    if place is not None and place.local_rank != 0:
        return
    if place is None or place.nodes == 1:
        report: Report | None = examine_alone()
    else:
        try:
            with own_store():
                place = find_place()  # Under torchrun the port is another one now.
                assert place is not None, "it has been found"
                report = examine(place, options.shared.absolute(), options.interface, options.wait)
        except ConfigurationError as error:
            print(f"mend: {error}", file=sys.stderr)
            sys.exit(1)
    if report is None:
        return
    alone = report.nodes == 1
    for table in (versions_table,) if alone else (hosts_table, versions_table, links_table):
        Console().print(table(report))
    problems = mends(report)
    for problem in problems:
        print(f"mend: {problem}")
    if alone:
        print(
            "This machine alone; for several, start it as the training will be, with srun, torchrun or mpirun, one "
            "process on each machine; docs/doctor.md has the commands"
        )
    elif not problems:
        print(f"All {report.nodes} hosts agree, reach each other and share {report.directory}")
    sys.exit(1 if problems else 0)


def hosts_table(report: Report) -> Table:
    """One row for each host."""
    table = Table("host", "address", "interface", "clock, s", title="Hosts", title_justify="left")
    for node, facts in sorted(report.hosts.items()):
        clock = "0" if node == 0 else _clock(report, node)
        table.add_row(f"{node} {facts.host}", facts.address, facts.interface, clock)
    return table


def versions_table(report: Report) -> Table:
    """One row for each version of each program."""
    table = Table("program", "version", "on", title="Versions", title_justify="left")
    for name in report.hosts[0].versions:
        found = {facts.host: facts.versions[name] for facts in report.hosts.values()}
        for version in dict.fromkeys(found.values()):
            hosts = [host for host, other in found.items() if other == version]
            table.add_row(name, version, "all" if len(hosts) == len(found) else ", ".join(hosts))
    return table


def links_table(report: Report) -> Table:
    """One row for each connection in one direction."""
    table = Table("from", "to", "round trip, ms", "Mbit/s", title="Connections", title_justify="left")
    for node, findings in sorted(report.findings.items()):
        for other in sorted((*findings.links, *findings.failures)):
            names = [report.hosts[number].host for number in (node, other)]
            if other in findings.links:
                round_trip, bandwidth, _ = findings.links[other]
                table.add_row(*names, f"{1e3 * round_trip:.2f}", f"{8e-6 * bandwidth:,.0f}")
            else:
                table.add_row(*names, "-", findings.failures[other])
    return table


def mends(report: Report) -> list[str]:
    """What is wrong and what to do about it; empty if all is well."""
    return [*_of_hosts(report), *_of_connections(report), *_of_each_host(report)]


def _of_hosts(report: Report) -> Iterator[str]:
    first = report.hosts[0]
    here = ", ".join(f"{facts.host} ({facts.address})" for facts in report.hosts.values())
    for node in range(report.nodes):
        if node not in report.hosts:
            yield (
                f"node {node} has not come; here are {here}: is the doctor started there, and does it reach "
                f"{first.host}? Look at its output"
            )
    for name in first.versions:
        found = {facts.host: facts.versions[name] for facts in report.hosts.values()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{version} on {host}" for host, version in found.items())
            yield f"{name} differs: {listed}: install the same version everywhere, best one shared environment"
    for other, (_, _, ahead) in report.findings[0].links.items():
        if abs(ahead) > CLOCK_SECONDS:
            yield (
                f"the clock of {report.hosts[other].host} is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {first.host}: keep both in step with NTP, for "
                "example with chrony"
            )


def _of_connections(report: Report) -> Iterator[str]:
    for node, findings in report.findings.items():
        for other, reason in findings.failures.items():
            there = report.hosts[other]
            yield (
                f"{report.hosts[node].host} cannot reach {there.host} at {there.address} port {there.port} ({reason}): "
                "allow TCP connections on all ports between the machines, or choose another network with --interface "
                "(and --network.interface in training)"
            )


def _of_each_host(report: Report) -> Iterator[str]:
    for node, facts in report.hosts.items():
        for problem in report.findings[node].shared:
            yield (
                f"{report.directory}: {facts.host} {problem}: checkpoints need a directory that all hosts share and "
                "may write to, such as an NFS mount; name it with --shared"
            )
        if facts.shared_memory is not None and facts.shared_memory < SHARED_MEMORY:
            yield (
                f"{facts.host} has {facts.shared_memory / 2**20:.0f} MiB of shared memory, through which data workers "
                "and NCCL hand over what they have: mount an emptyDir with `medium: Memory` at /dev/shm in a pod, or "
                "start the container with --shm-size=8g; data.init_args.num_workers=0 does without"
            )
        for problem in facts.gpus:
            yield f"{facts.host}: {problem}"


def _clock(report: Report, node: int) -> str:
    link = report.findings[0].links.get(node)
    return "?" if link is None else f"{link[2]:+.3f}"
