"""Fits on two hosts with a slow link: network namespaces, a worker and, with the parameter server, a server on each."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fits import Clock, Fit  # First: it makes the pipeline's benchmarks importable.
from hosts import hosts, run_on
from lightning.pytorch import Callback, LightningModule, Trainer
from wire import far_hosts

TIME_LIMIT = 900


class Notes(Callback):
    """Writes what the first host has measured at the end, and the bytes that it has sent in a step.

    Args:
        folder: Where the file goes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the bytes so far."""
        self.before = sent()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write both."""
        if trainer.is_global_zero:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            metrics["bytes"] = (sent() - self.before) / trainer.global_step
            (self.folder / "notes").write_text(json.dumps(metrics))


def sent() -> int:
    """Bytes that this host has sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def trainer_of(strategy: Any, folder: Path, epochs: int, devices: int = 1) -> Trainer:
    """The trainer of one host; to be called in the process that `fit_across` has started there.

    Args:
        strategy: The strategy.
        folder: Where the measured goes.
        epochs: How many.
        devices: Processes of a host.
    """
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # Not in the process that the parameter server's launcher starts from here.
        os.environ["NODE_RANK"] = os.environ.pop("RANK")
        del os.environ["WORLD_SIZE"]
    return Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=2,
        strategy=strategy,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=[Notes(folder), Clock(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def fit_across(megabits: int, arguments: Sequence[str], milliseconds: float = 0) -> tuple[Fit, dict[str, float]]:
    """Run the calling script on both hosts, with ``--folder`` and some arguments.

    Args:
        megabits: Mbit/s of the link in each direction.
        arguments: What the script needs to know of the fit.
        milliseconds: From one host to the other and back, where it is a long way.

    Returns:
        The times, and the metrics at the end with ``bytes``, those that the first host has sent in a step.
    """
    link = far_hosts(megabits, milliseconds) if milliseconds else hosts(2, megabits)
    with tempfile.TemporaryDirectory() as folder, link as names:
        run_on(names, [sys.executable, sys.argv[0], "--folder", folder, *arguments], timeout=TIME_LIMIT)
        notes = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
        metrics = json.loads((Path(folder) / "notes").read_text())
    return Fit([[end for end, _ in rank] for rank in notes], [[count for _, count in rank] for rank in notes]), metrics
