"""One of 2 workers slowed to a quarter: samples/s of modes that do not wait for it, against DDP.

Target: at least 1.6 times DDP's, in async. The slow worker sleeps after each batch
for three times the processor time that the batch took.
"""

import argparse
import statistics
from pathlib import Path

from fits import data, fit  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch.strategies import DDPStrategy
from networks import resnet_like
from ranks import report

from cnnstrategies.strategies import ParameterServerStrategy

SLOW = 1
STRATEGIES = {
    "ddp": lambda: DDPStrategy(start_method="fork"),
    "parameter_server, sync": lambda: ParameterServerStrategy(start_method="fork"),
    "parameter_server, ssp (4), dynamic": lambda: ParameterServerStrategy(
        "ssp", staleness=4, data_dispatch="dynamic", start_method="fork"
    ),
    "parameter_server, async, dynamic": lambda: ParameterServerStrategy(
        "async", data_dispatch="dynamic", start_method="fork"
    ),
    "parameter_server, local (8 own steps)": lambda: ParameterServerStrategy(
        "local", sync_every=8, start_method="fork"
    ),
}


def main() -> None:
    """Measure each strategy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of each worker, if both were as fast")
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()
    samples = 2 * options.steps * options.batch_size
    speeds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    shares: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(options.rounds):
        for name, strategy in STRATEGIES.items():
            fitted = fit(strategy, resnet_like, 10, lambda: data(32, 10, samples, options.batch_size), slow_rank=SLOW)
            speeds[name].append(fitted.samples_per_second())
            counts = [sum(rank) for rank in fitted.samples]
            shares[name].append(counts[SLOW] / sum(counts))
    rows = [("strategy", "samples/s", "times DDP's", "share of the slow worker")]
    base = statistics.median(speeds["ddp"])
    for name in STRATEGIES:
        speed, share = statistics.median(speeds[name]), statistics.median(shares[name])
        rows.append((name, f"{speed:.0f}", f"{speed / base:.2f}", f"{share:.0%}"))
    report(
        Path(__file__).with_suffix(".md"),
        "A slow worker",
        f"{__doc__}\nResNet-20, batches of {options.batch_size} images of 32 x 32; medians of {options.rounds} fits.",
        rows,
    )


if __name__ == "__main__":
    main()
