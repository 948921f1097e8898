"""``cnnstrategies doctor``: check a cluster before training on it."""

import sys
from collections.abc import Sequence

from rich.console import Console

from cnnstrategies.cluster.doctor import Report, examine, examine_alone
from cnnstrategies.cluster.doctor_report import hosts_table, links_table, mends, versions_table
from cnnstrategies.cluster.environment import find_place
from cnnstrategies.cluster.stores import own_store
from cnnstrategies.commands.front.options import doctor_parser
from cnnstrategies.errors import ConfigurationError


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
