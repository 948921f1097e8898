"""`compression: auto` when the link goes from 1000 to 50 Mbit/s in mid-run, against each fixed choice.

    python benchmarks/parameter_server/auto_compression.py

Target: at least 0.9 of the samples/s of the best fixed choice in each phase, with what it costs to find it. The hosts
are network namespaces with a worker, a server and a processor quota each; all their links change at once, while they
train. A phase is measured over whole and broken steps, by the ends of the workers' batches.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from across import trainer_of  # First: it makes the pipeline's benchmarks importable.
from fits import data, sgd
from hosts import hosts, limit
from hosts import missing as no_hosts
from lightning.pytorch import seed_everything
from one_more import Notes, done, wait_for
from pieces import Pieces, parser
from quotas import Group, quotas
from quotas import missing as no_quotas
from ranks import report
from torch import nn
from torchvision.models.vgg import make_layers

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import ParameterServerStrategy

HERE = Path(__file__).parent
MEGABITS = (1000, 50)
SECONDS = (40.0, 75.0)  # of each phase
CORES = 0.8
BATCH = 32
CLASSES = 100
FIRST = 3  # batches of each worker before anything is measured: auto has tried nothing by then
ROUNDS = 3  # of auto; then what is compared with it, of pushes and of pulls
FIXED = ["none/none", "fp16/fp16", "bf16/bf16", "topk/fp16", "topk/topk", "onebit/fp16", "onebit/onebit"]
AUTO = "auto/auto"


def network() -> nn.Sequential:
    """VGG-11 with half the channels and batch normalisation, for 32 x 32 images."""
    features = make_layers([32, "M", 64, "M", 128, 128, "M", 256, 256, "M", 256, 256, "M"], batch_norm=True)
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def train(folder: Path, compression: Any, pull_compression: Any) -> None:
    """One host's part; it trains until it is killed."""
    options = {"compression": compression, "pull_compression": pull_compression}
    strategy = ParameterServerStrategy(security="none", timeout=60, **options)  # Signs of life share the slow link.
    trainer = trainer_of(strategy, folder, epochs=1000)
    trainer.callbacks.append(Notes())  # type: ignore[attr-defined]
    seed_everything(1, verbose=False)
    trainer.fit(ImageClassifier(network(), CLASSES, optimizer=sgd), data(32, CLASSES, 2 * 300 * BATCH, BATCH))


def start(host: int, name: str, group: Group, folder: Path, codecs: str) -> subprocess.Popen[bytes]:
    """Run this script on a host."""
    variables = {
        "HOST": host,
        "RANK": host,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": 29700,
        "OMP_NUM_THREADS": 1,
    }
    command = ["ip", "netns", "exec", name, sys.executable, str(Path(__file__).resolve())]
    command += ["--folder", str(folder), "--codecs", codecs]
    environment = {**os.environ, **{variable: str(value) for variable, value in variables.items()}}
    with (folder / f"log-{host}").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=group.enter)


def measure(name: str) -> list[float]:
    """Samples per second in each phase, of both workers together."""
    codecs = name.split(", ")[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = stack.enter_context(quotas(2))
        names = stack.enter_context(hosts(2, MEGABITS[0]))
        for group in groups:
            stack.callback(group.end)
        processes = [start(host, names[host], groups[host], folder, codecs) for host in range(2)]
        for host, process in enumerate(processes):
            wait_for(folder, host, 1, process)
        for group in groups:
            group.limit(CORES)
        for host, process in enumerate(processes):
            wait_for(folder, host, FIRST, process)
        bounds = [time.monotonic()]
        for megabits, seconds in zip(MEGABITS, SECONDS, strict=True):
            limit(names, megabits)
            time.sleep(seconds)
            bounds.append(time.monotonic())
        for host, process in enumerate(processes):
            wait_for(folder, host, len(done(folder, host)) + 1, process)  # The end of the last broken step.
        log = (folder / "log-0").read_text()
        print("\n".join(line for line in log.splitlines() if "compression" in line), flush=True)
        ends = [done(folder, host) for host in range(2)]
    made = [sum(np.interp(bound, times, range(len(times))) for times in ends) for bound in bounds]
    spans = zip(made, made[1:], bounds, bounds[1:], strict=False)
    return [float(BATCH * (after - before) / (stop - begin)) for before, after, begin, stop in spans]


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    made = parser(__doc__)
    for option in ("--folder", "--codecs"):
        made.add_argument(option, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.folder:
        train(Path(options.folder), *options.codecs.split("/"))
        return
    pieces = Pieces(options)
    for why in (no_hosts(), no_quotas()):
        if why is not None:
            print(f"skipped: {why}")
            return
    autos = [f"{AUTO}, {turn + 1}" for turn in range(ROUNDS)]
    if not pieces.measure([*FIXED, *autos], measure):
        return
    phases = range(len(MEGABITS))
    rows: list[tuple[str, ...]] = [
        ("compression", "pull_compression", *(f"{megabits} Mbit/s" for megabits in MEGABITS))
    ]
    for name in FIXED:
        rows.append((*name.split("/"), *(f"{pieces.known[name][phase]:.0f}" for phase in phases)))
    speeds = [sorted(pieces.known[name][phase] for name in autos) for phase in phases]
    rows.append((*AUTO.split("/"), *(", ".join(f"{speed:.0f}" for speed in each) for each in speeds)))
    best = [max(pieces.known[name][phase] for name in FIXED) for phase in phases]
    shares = [f"**{statistics.median(each) / most:.2f}**" for each, most in zip(speeds, best, strict=True)]
    parameters = sum(p.numel() for p in network().parameters())
    report(
        HERE / "auto_compression.md",
        "The compression that the link asks for",
        f"{__doc__}\nVGG-11 with half the channels, {parameters:,} parameters, batches of {BATCH} images of 32 x 32, "
        f"mode sync, {CORES} cores for a host, topk 1 %. {SECONDS[0]:.0f} s with {MEGABITS[0]} Mbit/s, then "
        f"{SECONDS[1]:.0f} s with {MEGABITS[1]}. Samples/s, of auto in {ROUNDS} runs; their median is "
        f"{' and '.join(shares)} times that of the best fixed choice.",
        rows,
    )


if __name__ == "__main__":
    main()
