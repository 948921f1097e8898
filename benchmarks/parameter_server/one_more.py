"""Samples per second when one worker joins two. Target: at least 1.4 times as many, 10 s after it begins to join.

    python benchmarks/parameter_server/one_more.py

The hosts are network namespaces with links of 1 Gbit/s and a processor quota each, so that none becomes faster when
another has nothing to do. Two of them train ResNet-20 in mode async, each with a worker and a server; in mid-epoch a
third host runs `cnnstrategies join`. Before it has made its first batch that host has no quota: it imports torch and
Lightning meanwhile, which is most of the time that it takes to join.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fits  # noqa: F401  # First: it makes the pipeline's benchmarks importable.
from hosts import environment, hosts
from hosts import missing as no_hosts
from lightning.pytorch import Callback, LightningModule, Trainer
from pieces import Pieces, parser
from quotas import Group, quotas
from quotas import missing as no_quotas
from ranks import report

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEGABITS, CORES = 1000, 0.5
BEFORE, AFTER, JOINING = 20.0, 20.0, 10.0  # seconds
ROUNDS = 3
BATCH = 32
FIRST = 10  # batches of each worker before anything is measured


class Notes(Callback):
    """Writes down when each batch was done."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Add a line."""
        with Path(f"notes-{os.environ['HOST']}").open("a") as notes:
            print(time.monotonic(), file=notes)


def done(folder: Path, host: int) -> list[float]:
    """When the batches of a host were done."""
    notes = folder / f"notes-{host}"
    return [float(line) for line in notes.read_text().splitlines()] if notes.exists() else []


def start(host: int, name: str, group: Group, folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Run a command of the package on a host."""
    command = ["ip", "netns", "exec", name, sys.executable, str(ROOT / "cli.py"), *words]
    variables = environment(host, [ROOT, HERE, HERE.parent / "pipeline"])
    with (folder / f"log-{host}").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log, preexec_fn=group.enter)


def wait_for(folder: Path, host: int, batches: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a host has done some batches."""
    while len(done(folder, host)) < batches:
        time.sleep(0.05)
        if process.poll() is not None:
            raise SystemExit(f"host {host} has ended:\n{(folder / f'log-{host}').read_text()[-2000:]}")


def measure(name: str) -> dict[str, float]:
    """Samples per second before and after, and seconds until the first batch of the third worker."""
    config = ["--config", str(HERE / "one_more.yaml")]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = stack.enter_context(quotas(3))
        names = stack.enter_context(hosts(3, MEGABITS))
        for group in groups:
            stack.callback(group.end)
        keys = [sys.executable, "-c", "from cnnstrategies.cli import server; server()", "--make-keys", "run.key"]
        subprocess.run(keys, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        processes = [start(host, names[host], groups[host], folder, "fit", *config) for host in range(2)]
        for host, process in enumerate(processes):
            wait_for(folder, host, FIRST, process)
        for group in groups[:2]:
            group.limit(CORES)
        time.sleep(5)
        began = time.monotonic()
        time.sleep(BEFORE)
        asked = time.monotonic()
        address = ["--run", "tcp://10.77.0.1:7000", "--key_file", "run.key"]
        joiner = start(2, names[2], groups[2], folder, "join", *address, *config)
        wait_for(folder, 2, 1, joiner)
        groups[2].limit(CORES)
        time.sleep(max(0.0, asked + JOINING - time.monotonic()))
        since = time.monotonic()
        time.sleep(AFTER)
        until = time.monotonic()
        if any(process.poll() is not None for process in (*processes, joiner)):
            raise SystemExit(f"{name}: a process has ended")
        all_done = [done(folder, host) for host in range(3)]
    first = all_done[2][0] - asked

    def rate(start: float, stop: float) -> float:
        return BATCH * sum(start <= time < stop for batches in all_done for time in batches) / (stop - start)

    return {"first": first, "before": rate(began, asked), "after": rate(since, until), "since": since - asked}


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    for why in (no_hosts(), no_quotas()):
        if why is not None:
            print(f"skipped: {why}")
            return
    names = [f"round {number + 1}" for number in range(ROUNDS)]
    if not pieces.measure(names, measure):
        return
    rows: list[tuple[str, ...]] = [
        ("round", "samples/s of two", "of three", "ratio", "s to the first batch", "s to the measurement of three")
    ]
    ratios = []
    for name in names:
        rates = pieces.known[name]
        ratios.append(rates["after"] / rates["before"])
        rows.append(
            (
                name.removeprefix("round "),
                f"{rates['before']:.0f}",
                f"{rates['after']:.0f}",
                f"{ratios[-1]:.2f}",
                f"{rates['first']:.1f}",
                f"{rates['since']:.1f}",
            )
        )
    report(
        HERE / "one_more.md",
        "One more worker",
        f"{__doc__}\n{CORES} cores for a host, batches of {BATCH} images of 32 x 32, {BEFORE:.0f} s before and "
        f"{AFTER:.0f} s after. Median ratio: **{statistics.median(ratios):.2f}**.",
        rows,
    )


if __name__ == "__main__":
    main()
