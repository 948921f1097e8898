"""Unequal workers: samples/s of DDP and of shares, given or found, each worker with a processor quota of its own.

The limit is the sum of the workers' speeds by what DDP makes of them, as many times the slowest one's. Shares that are
found start equal, so what they take to be found counts. The last cluster has a worker that drops to a third, and comes
back: its figures are of each phase, by those of the best fixed shares for it.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "parameter_server"), str(Path(__file__).parents[1] / "pipeline")]

from fits import Fit, data, fit  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from networks import resnet_like
from quotas import Group, missing, quotas
from ranks import report

from cnnstrategies.strategies import BalancedDDPStrategy

CLUSTERS: dict[str, Sequence[float]] = {
    "two, one at 1/4": (1, 1 / 4),
    "two, one at 1/2": (1, 1 / 2),
    "four: 1, 1, 1/2, 1/4": (1, 1, 1 / 2, 1 / 4),
    "two equal": (1, 1),
}
TARGETS = {"two, one at 1/4": 2.3, "two, one at 1/2": 1.4, "four: 1, 1, 1/2, 1/4": 2.3, "two equal": 0.99}
CORES = 1.7  # of two, for all workers together
DROPS = 1 / 3


class Quota(Callback):
    """Puts each rank into its group, and gives it other quotas at some of its steps."""

    def __init__(self, groups: Sequence[Group], cores: Sequence[float], changes: dict[int, Sequence[float]]) -> None:
        self.groups, self.cores, self.changes = groups, cores, changes

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A rank begins."""
        rank = trainer.global_rank
        self.groups[rank].limit(self.cores[rank])
        self.groups[rank].enter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins."""
        if batch_idx in self.changes:
            self.groups[trainer.global_rank].limit(self.changes[batch_idx][trainer.global_rank])


Quota.__module__ = "cnnstrategies.quota"  # Else its hooks would be taken for a user's.


def strategies(speeds: Sequence[float]) -> dict[str, Callable[[], Any]]:
    """Return the strategies to compare, by name."""
    return {
        "ddp": lambda: DDPStrategy(start_method="fork"),
        "shares found": lambda: BalancedDDPStrategy(start_method="fork"),
        "shares given": lambda: BalancedDDPStrategy(list(speeds), start_method="fork"),
    }


def run(
    strategy: Callable[[], Any],
    speeds: Sequence[float],
    batch: int,
    steps: int,
    changes: dict[int, Sequence[float]] | None = None,
    precision: str = "32-true",
) -> Fit:
    """A fit in which each worker has its speed."""
    of_one = CORES / len(speeds) if min(speeds) == max(speeds) else min(0.9, CORES / sum(speeds))
    cores = [of_one * speed for speed in speeds]
    with quotas(len(speeds)) as groups:
        scaled = {step: [of_one * speed for speed in then] for step, then in (changes or {}).items()}
        quota = Quota(groups, cores, scaled)
        loader = partial(data, 32, 10, steps * batch * len(speeds), batch)
        return fit(strategy, resnet_like, 10, loader, workers=len(speeds), callbacks=[quota], precision=precision)


def between(fitted: Fit, first: int, stop: int) -> float:
    """Samples/s from one step to another."""
    ends = [max(rank[step] for rank in fitted.ends) for step in (first, stop)]
    return sum(sum(rank[first + 1 : stop + 1]) for rank in fitted.samples) / (ends[1] - ends[0])


def main() -> None:
    """Measure each cluster and strategy, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    rows = [("workers", "ddp, samples/s", "shares found, times DDP", "shares given", "limit", "target")]
    for name, speeds in CLUSTERS.items():
        rates: dict[str, list[float]] = {kind: [] for kind in strategies(speeds)}
        for _ in range(options.rounds):
            for kind, strategy in strategies(speeds).items():
                rates[kind].append(run(strategy, speeds, options.batch_size, options.steps).samples_per_second())
        ratios = {
            kind: [rate / base for rate, base in zip(values, rates["ddp"], strict=True)]
            for kind, values in rates.items()
        }
        shown_ratios = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in list(ratios.values())[1:]]
        limit = sum(speeds) / (len(speeds) * min(speeds))
        rows.append(
            (
                name,
                f"{statistics.median(rates['ddp']):.0f}",
                *shown_ratios,
                f"{limit:.2f}",
                f"at least {TARGETS[name]:g}",
            )
        )
    rows += changing(options.rounds, options.batch_size, options.steps)
    report(
        Path(__file__).with_suffix(".md"),
        "Unequal workers",
        f"{__doc__}\nResNet-20, batches of {options.batch_size} images of 32 x 32 for each worker, {options.steps} "
        f"steps; medians of {options.rounds} rounds, with the smallest and largest.",
        rows,
    )


def changing(rounds: int, batch: int, steps: int) -> list[tuple[str, ...]]:
    """A worker that drops to a third in the middle, and comes back."""
    phases = [(1.0, 1.0), (1.0, DROPS), (1.0, 1.0)]
    rates_of_phases: list[list[float]] = [[] for _ in phases]
    for _ in range(rounds):
        changes = {steps: phases[1], 2 * steps: phases[2]}
        fitted = run(lambda: BalancedDDPStrategy(start_method="fork"), phases[0], batch, 3 * steps, changes)
        for number, speeds in enumerate(phases):
            fixed = run(partial(BalancedDDPStrategy, list(speeds), start_method="fork"), speeds, batch, steps)
            rate = between(fitted, number * steps + 5, (number + 1) * steps - 1)
            rates_of_phases[number].append(rate / between(fixed, 5, steps - 1))
    names = ("one drops to 1/3: before", "while it is slow", "afterwards")
    return [
        (name, "", f"{statistics.median(r):.2f} of fixed ({min(r):.2f} to {max(r):.2f})", "", "1", "at least 0.9")
        for name, r in zip(names, rates_of_phases, strict=True)
    ]


if __name__ == "__main__":
    main()
