"""A step of parameter_server, mode sync, against one of Lightning's DDP (gloo): 2 workers, co-located servers.

Target: at most 1.00 times DDP's time. Fits of both alternate.
"""

import argparse
import statistics
from pathlib import Path

from fits import data, fit  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch.strategies import DDPStrategy
from networks import resnet_like, vgg_like
from ranks import report

from cnnstrategies.strategies import ParameterServerStrategy

NETWORKS = {"ResNet-20, 0.27 million parameters": (resnet_like, 10), "VGG-11, 9.5 million parameters": (vgg_like, 100)}
STRATEGIES = {
    "ddp": lambda: DDPStrategy(start_method="fork"),
    "parameter_server": lambda: ParameterServerStrategy(start_method="fork"),
}


def main() -> None:
    """Race for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=32, help="images of a worker's step")
    options = parser.parse_args()
    rows = [("network", "parameter server, ms", "DDP, ms", "ratio of medians", "median ratio of rounds")]
    for title, (make, classes) in NETWORKS.items():
        samples = 2 * options.steps * options.batch_size
        times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for index in range(options.rounds):
            for name in sorted(STRATEGIES, reverse=bool(index % 2)):
                found = fit(STRATEGIES[name], make, classes, lambda: data(32, classes, samples, options.batch_size))  # noqa: B023
                times[name].append(found.seconds_per_step())
        ours, peer = (statistics.median(times[name]) for name in ("parameter_server", "ddp"))
        pairs = statistics.median(a / b for a, b in zip(times["parameter_server"], times["ddp"], strict=True))
        rows.append((title, f"{ours * 1e3:.1f}", f"{peer * 1e3:.1f}", f"{ours / peer:.3f}", f"{pairs:.3f}"))
    report(
        Path(__file__).with_suffix(".md"),
        "A step of parameter_server against DDP's",
        f"{__doc__}\nA step is a batch of {options.batch_size} images of 32 x 32 for each worker, with SGD with "
        f"momentum, as `fit` makes it. {options.rounds} fits of {options.steps} steps of each; the first 5 of a fit do "
        "not count.",
        rows,
    )


if __name__ == "__main__":
    main()
