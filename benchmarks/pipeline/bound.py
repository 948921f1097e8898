"""Our step against its own bound: sum t_i + (M - 1) max t_i, from the profile of the stages. Target: at least 0.9."""

import argparse
from pathlib import Path

import torch
from measured import measure
from networks import resnet_like, vgg_like
from ranks import report

NETWORKS = {"VGG-11 with BatchNorm": (vgg_like, 32, 100), "ResNet-20": (resnet_like, 32, 10)}
MICROBATCHES = 8
SAMPLES = 64


def main() -> None:
    """Measure for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [("network", "cut after", "bound, ms", "step, ms", "bound / step")]
    for title, (make, size, classes) in NETWORKS.items():
        result = measure(make, size, classes, SAMPLES, MICROBATCHES, rounds)
        rows.append(
            (
                title,
                result.cut,
                f"{result.bound * 1e3:.1f}",
                f"{result.step * 1e3:.1f}",
                f"{result.bound / result.step:.3f}",
            )
        )
    report(
        Path(__file__).with_suffix(".md"),
        "Our step against the bound of its pipeline",
        f"{__doc__}\nTwo stages, {SAMPLES} images of 32 x 32 in {MICROBATCHES} microbatches, 1f1b. {rounds} rounds "
        "of a profile in both processes at once and 10 steps; the quickest profile and the quickest step, since "
        "other work on the machine only adds time.",
        rows,
    )


if __name__ == "__main__":
    main()
