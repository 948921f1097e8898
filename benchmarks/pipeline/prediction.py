"""The planner's predicted step time against the measured one, two stages on two CPU processes. Target: within 15 %."""

import argparse
from pathlib import Path

import torch
from measured import measure
from networks import mobilenet, resnet_like, vgg_like
from ranks import report

NETWORKS = {
    "VGG-11 with BatchNorm": (vgg_like, 32, 100),
    "ResNet-20": (resnet_like, 32, 10),
    "MobileNetV3-Small": (mobilenet, 64, 100),
}
MICROBATCHES = 8
SAMPLES = 64


def main() -> None:
    """Predict and measure for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [("network", "cut after", "predicted, ms", "measured, ms", "predicted / measured", "median of ratios")]
    here = Path(__file__)
    for title, (make, size, classes) in NETWORKS.items():
        timeline = here.with_name("timeline") if make is resnet_like else None
        result = measure(make, size, classes, SAMPLES, MICROBATCHES, rounds, timeline)
        rows.append(
            (
                title,
                result.cut,
                f"{result.predicted * 1e3:.1f}",
                f"{result.step * 1e3:.1f}",
                f"{result.predicted / result.step:.3f}",
                f"{result.prediction_ratio:.3f}",
            )
        )
    report(
        here.with_suffix(".md"),
        "Predicted against measured step time",
        f"{__doc__}\n{SAMPLES} images in {MICROBATCHES} microbatches, 1f1b, the cut that the planner chose. {rounds} "
        "rounds of a profile in both processes at once and 10 steps; the quickest profile and the quickest step, "
        "since other work on the machine only adds time; beside it the median of the rounds' ratios. The connection is "
        "measured between two processes beforehand. One step of ResNet-20, measured and predicted:\n\n"
        "![measured](timeline_measured.png)\n\n![predicted](timeline_predicted.png)",
        rows,
    )


if __name__ == "__main__":
    main()
