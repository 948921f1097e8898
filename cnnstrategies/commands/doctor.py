"""``cnnstrategies doctor``: check a cluster before training on it."""

import sys
from collections.abc import Sequence

from rich.console import Console

from cnnstrategies.cluster.doctor import examine
from cnnstrategies.cluster.doctor_place import find_place
from cnnstrategies.cluster.doctor_report import hosts_table, links_table, mends, versions_table
from cnnstrategies.cluster.doctor_ssh import run_over_ssh
from cnnstrategies.cluster.torchrun import own_store
from cnnstrategies.commands.doctor_options import parser
from cnnstrategies.errors import ConfigurationError


def main(args: Sequence[str]) -> None:
    """Check the hosts and exit with 0 if all is well, else with 1.

    Args:
        args: The command line from ``doctor`` on.

    Raises:
        ConfigurationError: No launcher has started this process, or on one host only.
    """
    options = parser().parse_args(args[1:])
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
            report = examine(place, options.shared.absolute(), options.interface, options.wait, options.listen)
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
