"""Accuracy on the digits with the settings of `tune --allow precision` and with Lightning's defaults, for 5 seeds."""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench import HERE, threads
from lightning.pytorch import Trainer, seed_everything
from pieces import Pieces, parser
from ranks import report
from torch import nn
from tune_networks import resnet_for_digits, vgg_for_digits

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule

SEEDS = 5
EPOCHS = 8
# What makes the network, and its learning rate.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "ResNet-20": (resnet_for_digits, 0.05),
    "VGG-11": (vgg_for_digits, 0.01),  # With 0.05 it learns half of the digits, whatever the precision.
}
# What tune has found for both: arguments of the model, and the trainer's precision.
SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "Lightning's defaults": ({}, "32-true"),
    "channels_last, bf16-mixed": ({"channels_last": True}, "bf16-mixed"),
}


def accuracy(name: str) -> float:
    """Train a network and return its accuracy on the test set."""
    network, settings, seed = name.split("/")
    arguments, precision = SETTINGS[settings]
    torch.set_num_threads(os.cpu_count() or 1)
    seed_everything(int(seed), verbose=False)
    make, rate = NETWORKS[network]
    model = ImageClassifier(
        make(),
        10,
        optimizer=partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=0.0005),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS),
        **arguments,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        precision=precision,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DigitsDataModule(seed=int(seed))
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, data, verbose=False)
    return float(metrics["test_acc"])


def main() -> None:
    """Train what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    names = [
        f"{network}/{settings}/{seed}" for network in NETWORKS for seed in range(1, SEEDS + 1) for settings in SETTINGS
    ]
    if not pieces.measure(names, accuracy):
        return
    rows = [
        (
            "network",
            *(f"{settings}: mean (least to most)" for settings in SETTINGS),
            "difference, mean and deviation of pairs",
        )
    ]
    for network in NETWORKS:
        accuracies = [
            [pieces.known[f"{network}/{settings}/{seed}"] for seed in range(1, SEEDS + 1)] for settings in SETTINGS
        ]
        pairs = [second - first for first, second in zip(*accuracies, strict=True)]
        shown = [f"{statistics.fmean(each):.4f} ({min(each):.4f} to {max(each):.4f})" for each in accuracies]
        rows.append((network, *shown, f"{statistics.fmean(pairs):+.4f}, {statistics.stdev(pairs):.4f}"))
    report(
        HERE / "tune_accuracy.md",
        "Accuracy with tuned settings",
        f"{__doc__}\n{EPOCHS} epochs on the 8 x 8 digits, enlarged to 16 x 16 (ResNet-20) and 32 x 32 (VGG-11); each "
        "seed has its own initial values, split and order, the same for both. Accuracy of the 360 test images: one of "
        f"them is 0.0028. The settings' speed is on "
        "[the page of the grid](tune_grid.md).",
        rows,
        threads(),
    )


if __name__ == "__main__":
    main()
