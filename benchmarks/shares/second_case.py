"""The second case of the sources: dynamic dispatch and mixed precision against DDP, which they say take 25 % less time.

One of two workers has a quarter of the other's processor time. Servers in mode async make another model; the others
train DDP's, but for the rounding. Mixed precision is bf16-mixed: on a processor without instructions for bfloat16 it
takes many times as long, so what it would save on one that has them is not shown there.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from unequal import run  # First: it makes the other benchmarks importable.

# isort: split
from lightning.pytorch.strategies import DDPStrategy
from ranks import report

from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy

SPEEDS = (1, 1 / 4)
served = partial(ParameterServerStrategy, start_method="fork")
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "ddp": (partial(DDPStrategy, start_method="fork"), "32-true"),
    "ddp, mixed precision": (partial(DDPStrategy, start_method="fork"), "bf16-mixed"),
    "ddp_balanced": (partial(BalancedDDPStrategy, start_method="fork"), "32-true"),
    "ddp_balanced, mixed precision": (partial(BalancedDDPStrategy, start_method="fork"), "bf16-mixed"),
    "parameter_server, sync, shares: auto": (partial(served, shares="auto"), "32-true"),
    "parameter_server, async, dynamic": (partial(served, "async", data_dispatch="dynamic"), "32-true"),
}


def main() -> None:
    """Measure each case, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, (strategy, precision) in CASES.items():
            fitted = run(strategy, SPEEDS, options.batch_size, options.steps, precision=precision)
            seconds[name].append(1000 / fitted.samples_per_second())
    rows = [("strategy", "seconds for 1000 images", "of DDP's time")]
    for name, times in seconds.items():
        parts = [time / base for time, base in zip(times, seconds["ddp"], strict=True)]
        spread = f"{statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
        rows.append((name, f"{statistics.median(times):.1f}", spread if name != "ddp" else ""))
    report(
        Path(__file__).with_suffix(".md"),
        "Dynamic dispatch and mixed precision",
        f"{__doc__}\nResNet-20, batches of {options.batch_size} images of 32 x 32 for each worker, {options.steps} "
        f"steps; medians of {options.rounds} rounds, with the smallest and largest.",
        rows,
    )


if __name__ == "__main__":
    main()
