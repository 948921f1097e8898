"""Two workers on each of 2 hosts, with a link of 200 Mbit/s: a node that pushes once against workers that each do.

The hosts are network namespaces, with a server on each. With `combine_per_node: true` a host's link carries one
worker's gradients and parameters, without it those of both; DDP's ring (gloo) over 4 ranks sends 1.5 times the
gradients. Target: at most 0.60 of the time without it, and less than DDP's. Fits alternate.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from across import fit_across, trainer_of
from fits import data, sgd
from hosts import missing
from lightning.pytorch import seed_everything
from lightning.pytorch.strategies import DDPStrategy
from networks import vgg_like
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import ParameterServerStrategy

MEGABITS = 200
DEVICES = 2
CLASSES = 100
COMBINED, EACH, DDP = "parameter_server, combine_per_node: true", "parameter_server", "ddp"
STRATEGIES: dict[str, Any] = {
    COMBINED: lambda: ParameterServerStrategy(security="none", combine_per_node=True),
    EACH: lambda: ParameterServerStrategy(security="none"),
    DDP: DDPStrategy,
}


def worker(folder: Path, strategy: str, steps: int, batch_size: int) -> None:
    """One host's part of a fit."""
    trainer = trainer_of(STRATEGIES[strategy](), folder, epochs=1, devices=DEVICES)
    seed_everything(1, verbose=False)
    model = ImageClassifier(vgg_like(), CLASSES, optimizer=sgd)
    trainer.fit(model, data(32, CLASSES, 2 * DEVICES * steps * batch_size, batch_size))


def main() -> None:
    """Race, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=8, help="images of a worker's step")
    for name in ("--folder", "--strategy"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        worker(Path(options.folder), options.strategy, options.steps, options.batch_size)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    sizes: dict[str, float] = {}
    for index in range(options.rounds):
        for name in list(STRATEGIES)[:: -1 if index % 2 else 1]:
            arguments = ["--strategy", name, "--steps", str(options.steps), "--batch_size", str(options.batch_size)]
            fit, notes = fit_across(MEGABITS, arguments)
            times[name].append(fit.seconds_per_step())
            sizes[name] = notes["bytes"] / 1e6
    rows = [("strategy", "seconds of a step (range)", "times that without combining", "MB sent by a host in a step")]
    base = statistics.median(times[EACH])
    for name, each in times.items():
        middle = statistics.median(each)
        spread = f"{middle:.2f} ({min(each):.2f} to {max(each):.2f})"
        rows.append((name, spread, f"{middle / base:.2f}", f"{sizes[name]:.1f}"))
    report(
        Path(__file__).with_suffix(".md"),
        "A node that pushes once",
        f"{__doc__}\nVGG-11, batches of {options.batch_size} images of 32 x 32 for each worker, with SGD with "
        f"momentum, as `fit` makes it; medians of {options.rounds} fits of {options.steps} steps. The first 5 of a fit "
        "do not count.",
        rows,
    )


if __name__ == "__main__":
    main()
