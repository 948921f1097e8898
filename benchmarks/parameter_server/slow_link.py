"""Compressed pushes over 100 Mbit/s against DDP: the digits on two hosts.

The hosts are network namespaces with links of 100 Mbit/s, a worker and a server on each. Target: at least 1.8 times the
samples/s of DDP without compression, at the same accuracy at the end. Bytes are what the first host's network device
sends.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fits import Clock, Fit  # First: it makes the pipeline's benchmarks importable.
from hosts import hosts, missing, run_on
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.strategies import CompressedDDPStrategy, ParameterServerStrategy

MEGABITS = 100
WIDTHS = [64, 128]
STRATEGIES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "ddp_fp16": lambda: CompressedDDPStrategy("fp16"),
    "sync": lambda: ParameterServerStrategy(security="none"),
    "sync, fp16": lambda: ParameterServerStrategy(security="none", compression="fp16"),
    "sync, topk 1 %": lambda: ParameterServerStrategy(security="none", compression="topk", compression_ratio=0.01),
    "local, every 8 steps": lambda: ParameterServerStrategy("local", sync_every=8, security="none"),
}


class Accuracy(Callback):
    """Writes the accuracy at the end, and the bytes that this host has sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the bytes so far."""
        self.before = sent()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write both."""
        if trainer.is_global_zero:
            notes = [float(trainer.callback_metrics["val_acc"]), (sent() - self.before) / trainer.global_step]
            (self.folder / "accuracy").write_text(json.dumps(notes))


def sent() -> int:
    """Bytes that this host has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def worker(name: str, folder: Path, epochs: int) -> None:
    """One host's part of a run."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # Not in the process that the parameter server's launcher starts from here.
        os.environ["NODE_RANK"] = os.environ.pop("RANK")
        del os.environ["WORLD_SIZE"]
    seed_everything(1, verbose=False)
    model = ImageClassifier(
        SmallCNN(10, widths=WIDTHS),
        10,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.0005),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        label_smoothing=0.05,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=STRATEGIES[name](),
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=[Accuracy(folder), Clock(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DigitsDataModule(batch_size=32))


def main() -> None:
    """Train with each strategy over the slow link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], Path(options.worker[1]), options.epochs)
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    found = {}
    for name in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder, hosts(2, MEGABITS) as names:
            command = [sys.executable, __file__, "--epochs", str(options.epochs), "--worker", name, folder]
            run_on(names, command, timeout=900)
            notes = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
            accuracy, size = json.loads((Path(folder) / "accuracy").read_text())
        fit = Fit([[end for end, _ in rank] for rank in notes], [[count for _, count in rank] for rank in notes])
        found[name] = (fit.samples_per_second(), size, accuracy)
    rows = [("strategy", "samples/s", "times DDP's", "MB sent by a host in a step", "val_acc at the end")]
    for name, (speed, size, accuracy) in found.items():
        rows.append((name, f"{speed:.0f}", f"{speed / found['ddp'][0]:.2f}", f"{size / 1e6:.2f}", f"{accuracy:.4f}"))
    parameters = sum(p.numel() for p in SmallCNN(10, widths=WIDTHS).parameters())
    report(
        Path(__file__).with_suffix(".md"),
        "Compression over a slow link",
        f"{__doc__}\nSmallCNN with {parameters:,} parameters, batches of 32 for each of 2 workers, {options.epochs} "
        "epochs; validation is part of the time.",
        rows,
    )


if __name__ == "__main__":
    main()
