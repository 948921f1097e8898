"""Three hosts whose processes and links fail once or more in a minute: how much of the work is done all the same?

    python benchmarks/parameter_server/storm.py [--minutes 30] [--seed 0] [--outputs FOLDER]

The hosts are network namespaces with links of 1 Gbit/s and a processor quota each, so that none becomes faster when
another has died. A parameter server trains there first, with a worker and a server on each host; then DDP under
torchrun, which starts all ranks again from the last checkpoint: it makes one every 200 steps. The same faults hit both.
Target: 0.95 of the samples/s without faults.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fits  # noqa: F401  # First: it makes the pipeline's benchmarks importable.
import yaml
from hosts import hosts
from hosts import missing as no_hosts
from pieces import Pieces, parser
from quotas import missing as no_quotas
from quotas import quotas
from ranks import report
from storm_faults import BAD_MEGABITS, KINDS, LOSS, MEGABITS, Fault, play, schedule
from storm_host import validations
from storm_results import quiet, samples_of_epoch, trains, useful, whole
from storm_run import HERE, HOSTS, Run
from storm_watch import seen

STRATEGIES = ("parameter server", "ddp")
CORES = 0.5
AN_HOUR = 75  # faults
CALM = 1 / 6  # of the storm's length: without faults, half of it before the storm and half of it after
SETTLE = 30.0  # seconds after the quotas are set
PATIENCE = 180.0  # seconds after the storm, for the run to be whole again
PRESENT = 5.0  # seconds for which all servers are there before one of them is hit: the copies are complete
ABSENT = 30.0  # seconds to wait for what is to be hit
SETTINGS = yaml.safe_load((HERE / "storm.yaml").read_text())
REPEATS = SETTINGS["data"]["init_args"]["repeats"]
TIMEOUT = SETTINGS["trainer"]["strategy"]["init_args"]["timeout"]


def measure(strategy: str, minutes: float, seed: int, outputs: Path | None) -> dict[str, Any]:
    """Samples per second with and without faults, and what happened after each fault."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        *groups, own_group = stack.enter_context(quotas(HOSTS + 1, "cnnstorm"))
        own_group.enter()  # Before what else the machine does, as the hosts are: else a fault would come late.
        stack.callback((own_group.folder.parent / "cgroup.procs").write_text, str(os.getpid()))
        names = stack.enter_context(hosts(HOSTS + 1, MEGABITS))
        if outputs is not None:
            stack.callback(shutil.copytree, folder, outputs / strategy, dirs_exist_ok=True)
        run = Run(strategy, names, groups, folder)
        stack.callback(run.end)
        run.begin(CORES)
        time.sleep(SETTLE)
        calm = 60 * minutes * CALM / 2
        began = time.monotonic()
        run.wait(began + calm)
        storm = time.monotonic()
        faults = [
            (fault, hit)
            for fault in schedule(seed, 60 * minutes, AN_HOUR)
            if (hit := _hit(run, fault, storm, names[:HOSTS], folder, strategy)) is not None
        ]
        run.wait(storm + 60 * minutes)
        over = time.monotonic()
        while (steady := trains([run.batches(host) for host in range(HOSTS)], over)) is None:
            run.wait(time.monotonic() + 1)
            if time.monotonic() > over + PATIENCE:
                break
        again = time.monotonic()
        run.wait(again + calm)
        ended = time.monotonic()
        run.stop()
        batches = [run.batches(host) for host in range(HOSTS)]
        answers = seen(folder / "members") if strategy == STRATEGIES[0] else None
        validated = validations(folder)
    size = samples_of_epoch(REPEATS)
    spans = [(began, storm)] + ([(again, ended)] if steady is not None else [])
    after = [whole(fault, hit, batches, answers) for fault, hit in faults]
    hits = [(hit, took) for (_, hit), took in zip(faults, after, strict=True)]
    return {
        "calm": sum(useful(batches, size, *span) for span in spans) / sum(stop - start for start, stop in spans),
        "storm": useful(batches, size, storm, over) / (over - storm),
        "quiet": quiet(batches, size, hits, storm, over),
        "epoch": (storm - began) * size / max(1, useful(batches, size, began, storm)),
        "repeated": sum(done.samples for host in batches for done in host if storm <= done.at < over) / (over - storm),
        "before": next((validation.accuracy for validation in reversed(validated) if validation.at < storm), None),
        "after": next((validation.accuracy for validation in reversed(validated) if validation.at < over), None),
        "faults": [{**asdict(fault), "whole": took} for (fault, _), took in zip(faults, after, strict=True)],
        "ends": [[at - storm, host, code] for at, host, code in run.ends],
    }


def _hit(run: Run, fault: Fault, storm: float, names: list[str], folder: Path, strategy: str) -> float | None:
    """Wait for a fault's moment and what it hits, and play it; when it began, None if there was nothing to hit."""
    kind = KINDS[fault.kind]
    run.wait(storm + fault.at)
    deadline = time.monotonic() + ABSENT
    while kind.target != "link":
        pid = run.find(fault.host, kind.target)
        if pid is not None and (kind.target != "server" or strategy != STRATEGIES[0] or _servers_are_there(folder)):
            break
        if time.monotonic() > deadline:
            print(f"{kind.name}, host {fault.host}: left out, since there is none", flush=True)
            return None
        run.wait(time.monotonic() + 0.5)
    hit = time.monotonic()
    print(f"{hit:.2f} {hit - storm:6.1f} s: {kind.name}, host {fault.host}, {fault.seconds:.1f} s", flush=True)
    play(kind, fault, pid if kind.target != "link" else None, names)
    return hit


def _servers_are_there(folder: Path) -> bool:
    """Whether all servers have been there for a while."""
    late = [answer for answer in seen(folder / "members") if answer.at > time.monotonic() - PRESENT]
    return len(late) > 1 and all(answer.servers == late[0].servers and len(answer.servers) == HOSTS for answer in late)


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    made = parser(__doc__)
    made.set_defaults(seconds=float("inf"))
    made.add_argument("--minutes", type=float, default=30, help="how long each storm lasts")
    made.add_argument("--seed", type=int, default=0, help="of the faults")
    made.add_argument("--outputs", type=Path, help="folder for what the hosts print and note")
    made.add_argument("--page", type=Path, default=HERE / "storm.md")
    return made.parse_args()


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    arguments = options()
    for why in (no_hosts(), no_quotas()):
        if why is not None:
            print(f"skipped: {why}")
            return
    pieces = Pieces(arguments)
    names = {f"{strategy}, {arguments.minutes:g} minutes, seed {arguments.seed}": strategy for strategy in STRATEGIES}
    limits = arguments.minutes, arguments.seed, arguments.outputs
    if pieces.measure(list(names), lambda name: measure(names[name], *limits)):
        write(arguments, [pieces.known[name] for name in names])


def write(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Write the page."""
    lines = [
        ("samples/s without faults", [f"{result['calm']:.0f}" for result in results]),
        ("samples/s in the storm", [f"{result['storm']:.0f}" for result in results]),
        ("goodput: their ratio", [f"**{result['storm'] / result['calm']:.2f}**" for result in results]),
        ("samples/s in the storm's quiet moments", [f"{result['quiet']:.0f}" for result in results]),
        ("goodput against these", [f"**{result['storm'] / result['quiet']:.2f}**" for result in results]),
        ("work that was done twice", [f"{1 - result['storm'] / result['repeated']:.1%}" for result in results]),
        ("an epoch without faults", [f"{result['epoch']:.0f} s" for result in results]),
        ("faults", [str(len(result["faults"])) for result in results]),
        ("a host's own process has ended", [str(len(result["ends"])) for result in results]),
        ("accuracy before the storm", [_accuracy(result["before"]) for result in results]),
        ("accuracy at its end", [_accuracy(result["after"]) for result in results]),
    ]
    table = "\n".join(f"| {title} | {' | '.join(numbers)} |" for title, numbers in lines)
    rows: list[tuple[str, ...]] = [
        (
            "what happens",
            "times",
            *(f"{name}: whole again after, median" for name in STRATEGIES),
            *(f"{name}: worst" for name in STRATEGIES),
        )
    ]
    for number, kind in enumerate(KINDS):
        each = [[fault["whole"] for fault in result["faults"] if fault["kind"] == number] for result in results]
        if not any(each):
            continue
        rows.append(
            (
                kind.name,
                " / ".join(str(len(times)) for times in each),
                *(_seconds(times, statistics.median) for times in each),
                *(_seconds(times, max) for times in each),
            )
        )
    report(
        arguments.page,
        "A storm of faults",
        f"""{__doc__}
A storm of {arguments.minutes:g} minutes with {AN_HOUR} faults an hour, seed {arguments.seed}; {CORES} cores for a host.
SmallCNN on the digits in batches of 32 for each worker, in epochs of {REPEATS} times all training images. The parameter
server runs in mode async with `data_dispatch: dynamic`, `replication: 2`, `max_restarts` and
`start_method: fork`, encrypted. The same run without faults is measured for {60 * arguments.minutes * CALM / 2:.0f} s
before the storm and as long after it. What was lost and done again counts once. The speed of a shared machine changes
in half an hour; in the storm's quiet moments, when the run is whole and before the next fault, it is that of the time.

| | {" | ".join(STRATEGIES)} |
|---|---|---|
{table}

*Whole again*: seconds from the beginning of a fault, its own length included, until every worker has done two more
batches and the coordinator hears all servers, the one that was hit in its new life. Another fault may come before that.

Processes are hit as the table of [what happens when something dies](../../docs/parameter-server.md#when-something-dies)
promises that the run goes on; a server only when all copies are complete. The process that has started `fit` is never
hit, and the link of the coordinator's host is not down for as long as the time-out of {TIMEOUT} s: nothing is promised
of them. DDP has neither servers nor a coordinator: there the rank of that host is hit. torchrun may start all ranks
again 1,000 times, and is itself started again when it ends; so is `fit` on all hosts, from the last checkpoint, once it
has ended on all of them.

A bad link has {BAD_MEGABITS} Mbit/s, a queue of 50 ms, and loses {LOSS:.0%} of the packets in each direction by chance;
the kernel of this machine has no netem.""",
        rows,
        "one thread per process",
    )


def _accuracy(accuracy: float | None) -> str:
    """Return the text for the accuracy of a validation; None means that no validation has run."""
    return "not validated yet" if accuracy is None else f"{accuracy:.4f}"


def _seconds(times: list[float | None], statistic: Any) -> str:
    """Median or worst of those that were whole again, and how many never were."""
    finite = [time for time in times if time is not None]
    never = len(times) - len(finite)
    text = f"{statistic(finite):.1f} s" if finite else ""
    return text + (f"{', ' if text else ''}{never} never" if never else "")


if __name__ == "__main__":
    main()
