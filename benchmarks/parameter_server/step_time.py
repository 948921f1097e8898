"""A step of parameter_server, mode sync, against one of Lightning's DDP (gloo): 2 workers, co-located servers.

Target: at most 1.00 times DDP's time. The fits of all variants alternate. The variant with hooks also has a callback
that reads gradients before the optimizer's step and weights after it, as a user's callback may. Gradients are then
pushed inside the optimizer's step, and all values have arrived when the step ends.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from fits import data, fit  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from networks import resnet_like, vgg_like
from ranks import report

from cnnstrategies.strategies import ParameterServerStrategy

NETWORKS = {"ResNet-20, 0.27 million parameters": (resnet_like, 10), "VGG-11, 9.5 million parameters": (vgg_like, 100)}


class Looks(Callback):
    """Reads nothing, but has the hooks in which it could."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Could clip."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Could average."""


WAYS = {
    "ddp": (lambda: DDPStrategy(start_method="fork"), ()),
    "parameter_server": (lambda: ParameterServerStrategy(start_method="fork"), ()),
    "with hooks": (lambda: ParameterServerStrategy(start_method="fork"), (Looks(),)),
}


def main() -> None:
    """Race for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=32, help="images of a worker's step")
    options = parser.parse_args()
    header = ("network", *(f"{name}, ms" for name in WAYS), "ratio of medians", "of rounds", "with hooks / without")
    rows = [header]
    for title, (make, classes) in NETWORKS.items():
        samples = 2 * options.steps * options.batch_size
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for index in range(options.rounds):
            for name in sorted(WAYS, reverse=bool(index % 2)):
                strategy, callbacks = WAYS[name]
                loader = partial(data, 32, classes, samples, options.batch_size)
                times[name].append(fit(strategy, make, classes, loader, callbacks=callbacks).seconds_per_step())
        medians = {name: statistics.median(times[name]) for name in WAYS}
        row = [
            *(f"{value * 1e3:.1f}" for value in medians.values()),
            f"{medians['parameter_server'] / medians['ddp']:.3f}",
        ]
        for contestant, base in (("parameter_server", "ddp"), ("with hooks", "parameter_server")):
            ratios = sorted(a / b for a, b in zip(times[contestant], times[base], strict=True))
            row.append(f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
        rows.append((title, *row))
    report(
        Path(__file__).with_suffix(".md"),
        "A step of parameter_server against DDP's",
        f"{__doc__}\nA step is a batch of {options.batch_size} images of 32 x 32 for each worker, with SGD with "
        f"momentum, as `fit` makes it. {options.rounds} fits of {options.steps} steps of each; the first 5 of a fit do "
        "not count. Ratios are medians of those of each round, with the least and the greatest.",
        rows,
    )


if __name__ == "__main__":
    main()
