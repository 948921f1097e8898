"""A step of a pipeline that plans its cuts by a plain loader's batch, against one whose data module says its size.

Two processes, the first of which loads. The fits take turns, each with a profile and cuts of its own.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "parameter_server"))

import torchvision
from fits import data, fit
from lightning.pytorch import LightningDataModule
from ranks import report
from torch import nn
from torch.utils.data import DataLoader

from cnnstrategies.strategies import HybridPipelineStrategy

BATCH, SIZE, CLASSES = 64, 48, 10


class Module(LightningDataModule):
    """Has the loader, and says how many samples are in a batch."""

    batch_size = BATCH

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader[Any]:
        """The loader."""
        return self.loader


def network() -> nn.Module:
    """ResNet-18 as torchvision has it."""
    return torchvision.models.resnet18(num_classes=CLASSES)


def seconds(in_module: bool, steps: int) -> float:
    """Return the seconds of a step with a plain loader, or with the loader in a data module."""
    plain: Callable[[], DataLoader[Any]] = partial(data, SIZE, CLASSES, steps * BATCH, BATCH)
    loader: Any = (lambda: Module(plain())) if in_module else plain
    return fit(partial(HybridPipelineStrategy, start_method="fork"), network, CLASSES, loader).seconds_per_step()


def main() -> None:
    """Measure both in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds):
        for in_module in (False, True) if number % 2 else (True, False):
            times[in_module].append(seconds(in_module, options.steps))
            print(in_module, times[in_module][-1], flush=True)
    ratios = [plain / module for plain, module in zip(*times.values(), strict=True)]
    report(
        Path(__file__).with_suffix(".md"),
        "Plain loader and data module under a pipeline",
        f"{__doc__}\nResNet-18, batches of {BATCH} images of {SIZE} x {SIZE}, {options.steps} steps of which five warm "
        f"up, {options.rounds} rounds; the medians, and the median ratio of a round with the least and the most.",
        [
            ("plain loader, ms a step", "data module, ms a step", "ratio", "least to most", "target"),
            (
                *(f"{1e3 * statistics.median(seconds_of_loader):.0f}" for seconds_of_loader in times.values()),
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                "at most 1.05",
            ),
        ],
    )


if __name__ == "__main__":
    main()
