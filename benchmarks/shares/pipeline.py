"""Unequal replicas of a pipeline's stage: a step with equal shares by one with shares that are found, or given.

The first stage has two replicas, of which one is slower by its processor quota; the second stage has one. Beside what
was measured stands what `plan` predicts for a cluster with these speeds, from a profile of the network that is taken
first. Shares that are found start equal, and the steps in which they are found count.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

from unequal import missing, run  # First: it makes the other benchmarks importable.

# isort: split
from networks import images, resnet_like
from ranks import report

from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.pipeline.tracing import find_cut, trace
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.measure import measure_profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.strategies import HybridPipelineStrategy

CUT, REPLICAS, MICROBATCHES = "group2", (2, 1), 12
SPEEDS = {"one at 1/2": (1, 1 / 2, 1), "one at 1/4": (1, 1 / 4, 1), "equal": (1, 1, 1)}
LINK = Link(2e9, 5e-5)  # Between processes of one machine.


def predicted(profile: Profile, cut: int, speeds: tuple[float, ...], samples: int) -> float:
    """A step with equal shares by one with those that `plan` deals."""
    cluster = Cluster(tuple(Host(1, LINK, LINK, speed) for speed in speeds))
    layout = Layout((cut,), REPLICAS)

    def step(shares: tuple[float, ...] | None) -> float:
        return Predictor(
            Job(profile, cluster, samples, MICROBATCHES, replicas=REPLICAS, shares=shares, cuts=layout.cuts)
        ).time(layout)

    return step((1,) * len(speeds)) / step(None)


def main() -> None:
    """Measure each cluster and each kind of shares, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=48)
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    traced = trace(resnet_like())
    # The batch that both replicas load together; the profile is of a device's share of it.
    samples = 2 * options.batch_size
    profile = measure_profile(traced, images(32, samples, 10)[0], samples // 3, CPU, "32-true", False)
    pipeline = partial(
        HybridPipelineStrategy, cuts=[CUT], replicas=list(REPLICAS), microbatches=MICROBATCHES, start_method="fork"
    )
    rows = [("the replicas", "equal, ms a step", "found: times as fast", "given", "predicted")]
    for name, speeds in SPEEDS.items():
        kinds = {
            "equal": partial(pipeline, shares="equal"),
            "found": partial(pipeline, shares="auto"),
            "given": partial(pipeline, shares=list(speeds)),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, strategy in kinds.items():
                seconds[kind].append(run(strategy, speeds, options.batch_size, options.steps).seconds_per_step())
        gains = [[b / a for b, a in zip(seconds["equal"], seconds[kind], strict=True)] for kind in ("found", "given")]
        shown_gains = [f"{statistics.median(gain):.2f} ({min(gain):.2f} to {max(gain):.2f})" for gain in gains]
        gain = predicted(profile, find_cut(traced, CUT), speeds, samples)
        rows.append((name, f"{1e3 * statistics.median(seconds['equal']):.0f}", *shown_gains, f"{gain:.2f}"))
        print(*rows[-1], sep=" | ", flush=True)
    report(
        Path(__file__).with_suffix(".md"),
        "Unequal replicas of a pipeline",
        f"{__doc__}\nResNet-20, cut after its second group, batches of {options.batch_size} images of 32 x 32 for each "
        f"replica of the first stage in {MICROBATCHES} microbatches, {options.steps} steps; medians of "
        f"{options.rounds} rounds, with the smallest and largest.",
        rows,
    )


if __name__ == "__main__":
    main()
