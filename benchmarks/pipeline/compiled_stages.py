"""Our step with stages that inductor has compiled, against the same step without, with two stages.

Each has two processes of its own, a step in turn while the others sleep. What is compiled is compiled before.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from networks import images
from peer_step import row
from ranks import report, run_contest

from cnnstrategies.networks import SmallCNN
from cnnstrategies.pipeline.engine import Pipeline

MICROBATCHES = 4
SAMPLES = 64
CUT = "pool1"


def step_with(backend: str | None) -> Callable[[int], Callable[[], float]]:
    """Return a function that prepares the step of a rank."""

    def on(rank: int) -> Callable[[], float]:
        torch.manual_seed(1)
        pipeline = Pipeline(
            SmallCNN(10, in_channels=3, dropout=0.0), [CUT], [1, 1], MICROBATCHES, compile_backend=backend
        )
        data = images(32, SAMPLES, 10)

        def step() -> float:
            pipeline.module.zero_grad(set_to_none=True)
            return float(pipeline.step(*data, F.cross_entropy))

        return step

    return on


def main() -> None:
    """Race."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    plain, compiled = run_contest(2, [step_with(None), step_with("inductor")], rounds)
    losses = plain[0][2], compiled[0][2]
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
    report(
        Path(__file__).with_suffix(".md"),
        "Stages that inductor has compiled",
        f"{__doc__}\nSmallCNN, {SAMPLES} images of 32 x 32 in {MICROBATCHES} microbatches, 1f1b, {rounds} rounds; the "
        "medians, the median ratio of a round with an interval of 95 %, and the ratio of processor time, the firmer of "
        "the two where the machine is as busy as it was.",
        [
            ("network", "cut after", "compiled, ms", "not compiled, ms", "ratio", "interval", "processor time"),
            row("SmallCNN", CUT, compiled, plain),
        ],
    )


if __name__ == "__main__":
    main()
