"""``cnnstrategies doctor``: check a cluster before training on it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from cnnstrategies.cluster.doctor import examine
from cnnstrategies.cluster.doctor_place import find_place
from cnnstrategies.cluster.doctor_report import hosts_table, links_table, mends, versions_table
from cnnstrategies.cluster.doctor_ssh import run_over_ssh
from cnnstrategies.cluster.torchrun import own_store
from cnnstrategies.errors import ConfigurationError

PORT = 29480


def main(args: Sequence[str]) -> None:
    """Check the hosts and exit with 0 if all is well, else with 1.

    Args:
        args: The command line from ``doctor`` on.

    Raises:
        ConfigurationError: No launcher has started this process, or on one host only.
    """
    options = _parser().parse_args(args[1:])
    if options.hosts:
        passed = [f"--shared={options.shared.absolute()}", f"--wait={options.wait:g}"]
        if options.interface:
            passed.append(f"--interface={options.interface}")
        sys.exit(run_over_ssh(options.hosts.split(","), options.port, options.ssh, passed))
    place = find_place()
    if place.local_rank != 0:
        return
    if place.nodes == 1:
        raise ConfigurationError("cnnstrategies doctor has been started on one host: it checks two or more")
    try:
        with own_store():
            place = find_place()  # Under torchrun the port is another one now.
            report = examine(place, options.shared.absolute(), options.interface, options.wait)
    except ConfigurationError as error:
        print(f"mend: {error}", file=sys.stderr)
        sys.exit(1)
    if report is None:
        return
    console = Console()
    for table in (hosts_table(report), versions_table(report), links_table(report)):
        console.print(table)
    problems = mends(report)
    for problem in problems:
        print(f"mend: {problem}")
    if not problems:
        print(f"All {report.nodes} hosts agree, reach each other and share {report.directory}")
    sys.exit(1 if problems else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cnnstrategies doctor",
        description="Check a cluster before training: versions, connections, shared directory, clocks. Start it as the "
        "training will be, with srun, torchrun or mpirun, one process on each machine; or with --hosts over SSH.",
        allow_abbrev=False,
    )
    parser.add_argument("--hosts", help="names of the machines, with commas: start the doctor there over SSH")
    parser.add_argument("--ssh", default="ssh", help="the SSH command with its options (default: ssh)")
    parser.add_argument("--port", type=int, default=PORT, help=f"main port with --hosts (default: {PORT})")
    parser.add_argument(
        "--shared", type=Path, default=Path(), help="directory for checkpoints on shared storage (default: this one)"
    )
    parser.add_argument("--interface", help="network interface, by name or subnet (default: by route)")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other hosts (default: 60)")
    return parser
