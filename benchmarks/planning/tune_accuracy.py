"""What `tune --allow precision` writes against Lightning's defaults, by accuracy on the digits: 5 seeds of each."""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from bench import HERE, environment, threads
from pieces import Pieces, parser
from ranks import report

SEEDS = 5
EPOCHS = 8
NETWORKS = {"ResNet-20": "tune_networks.resnet_for_digits", "VGG-11": "tune_networks.vgg_for_digits"}
SETTINGS: dict[str, dict[str, Any]] = {
    "Lightning's defaults": {},
    "channels_last, bf16-mixed": {
        "trainer": {"precision": "bf16-mixed"},
        "model": {"init_args": {"channels_last": True}},
    },
}


def accuracy(name: str) -> float:
    """Of the test set, after a fit."""
    network, settings, seed = name.split("/")
    base = {
        "seed_everything": int(seed),
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": "auto",
            "max_epochs": EPOCHS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        },
        "model": {
            "class_path": "cnnstrategies.ImageClassifier",
            "init_args": {
                "num_classes": 10,
                "network": {"class_path": NETWORKS[network]},
                "optimizer": {
                    "class_path": "torch.optim.SGD",
                    "init_args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0005},
                },
                "lr_scheduler": {
                    "class_path": "torch.optim.lr_scheduler.CosineAnnealingLR",
                    "init_args": {"T_max": EPOCHS},
                },
            },
        },
        "data": {"class_path": "cnnstrategies.data.DigitsDataModule", "init_args": {"seed": int(seed)}},
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "base.yaml", Path(folder) / "settings.yaml"]
        for file, content in zip(files, (base, SETTINGS[settings]), strict=True):
            file.write_text(yaml.safe_dump(content))
        result = Path(folder) / "accuracy"
        subprocess.run(
            [sys.executable, __file__, "--fit", str(result), *(f"--config={file}" for file in files)],
            env=environment(),
            check=True,
            cwd=folder,
        )
        return float(result.read_text())


def fit(result: str, words: list[str]) -> None:
    """Train and test in this process."""
    from cnnstrategies.commands.lightning_cli import CLI

    sys.argv = ["cnnstrategies", *words]
    cli = CLI(run=False)
    cli.trainer.fit(cli.model, cli.datamodule)
    (metrics,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    Path(result).write_text(str(metrics["test_acc"]))


def main() -> None:
    """Train what is missing; write the page when nothing is."""
    if sys.argv[1:2] == ["--fit"]:
        fit(sys.argv[2], sys.argv[3:])
        return
    pieces = Pieces(parser(__doc__).parse_args())
    names = [f"{network}/{one}/{seed}" for network in NETWORKS for seed in range(1, SEEDS + 1) for one in SETTINGS]
    if not pieces.measure(names, accuracy):
        return
    rows = [
        ("network", *(f"{one}: mean (least to most)" for one in SETTINGS), "difference, mean and deviation of pairs")
    ]
    for network in NETWORKS:
        found = [[pieces.known[f"{network}/{one}/{seed}"] for seed in range(1, SEEDS + 1)] for one in SETTINGS]
        pairs = [two - one for one, two in zip(*found, strict=True)]
        shown = [f"{statistics.fmean(each):.4f} ({min(each):.4f} to {max(each):.4f})" for each in found]
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
