"""A step of parameter_server, mode sync, against one of Lightning's DDP (gloo) over 1 Gbit/s: 2 hosts.

The hosts are network namespaces with links of 1 Gbit/s, a worker and a server on each. Target: at most 0.80 times
DDP's time for VGG-11. Fits of both alternate.
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
from networks import resnet_like, vgg_like
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import ParameterServerStrategy

MEGABITS = 1000
NETWORKS = {
    "ResNet-20": (resnet_like, 10),
    "VGG-11": (vgg_like, 100),
}
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "parameter_server": lambda: ParameterServerStrategy(security="none"),
}


def worker(folder: Path, network: str, strategy: str, steps: int, batch_size: int) -> None:
    """One host's part of a fit."""
    make, classes = NETWORKS[network]
    trainer = trainer_of(STRATEGIES[strategy](), folder, epochs=1)
    seed_everything(1, verbose=False)
    model = ImageClassifier(make(), classes, optimizer=sgd)
    trainer.fit(model, data(32, classes, 2 * steps * batch_size, batch_size))


def main() -> None:
    """Race for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=32, help="images of a worker's step")
    for name in ("--folder", "--network", "--strategy"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        worker(Path(options.folder), options.network, options.strategy, options.steps, options.batch_size)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    rows = [("network", "parameter server, ms", "DDP, ms", "ratio of medians", "MB sent by a host in a step; with DDP")]
    for network in NETWORKS:
        times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        size: dict[str, float] = {}
        for index in range(options.rounds):
            for name in sorted(STRATEGIES, reverse=bool(index % 2)):
                arguments = ["--network", network, "--strategy", name, "--steps", str(options.steps)]
                fit, notes = fit_across(MEGABITS, [*arguments, "--batch_size", str(options.batch_size)])
                times[name].append(1000 * fit.seconds_per_step())
                size[name] = notes["bytes"] / 1e6
        ours, peer = (statistics.median(times[name]) for name in ("parameter_server", "ddp"))
        sizes = f"{size['parameter_server']:.1f}, {size['ddp']:.1f}"
        rows.append((network, f"{ours:.1f}", f"{peer:.1f}", f"{ours / peer:.3f}", sizes))
    report(
        Path(__file__).with_suffix(".md"),
        "A step over 1 Gbit/s",
        f"{__doc__}\nA step is a batch of {options.batch_size} images of 32 x 32 for each worker, with SGD with "
        f"momentum, as `fit` makes it. {options.rounds} fits of {options.steps} steps of each; the first 5 of a fit do "
        "not count.",
        rows,
    )


if __name__ == "__main__":
    main()
