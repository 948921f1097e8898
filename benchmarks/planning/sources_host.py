"""A host's side of `sources.py`: it trains, or profiles the network under the host's quota."""

import argparse
import base64
import contextlib
import json
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from sources import BATCH, RUNS, SIZE, TARGET, Run
from tune_networks import resnet_for_digits

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning.costs import from_two_sizes
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.strategies import ParameterServerStrategy

EPOCHS = 20
SMALLER = 4


class Accuracy(Callback):
    """Waits for the quotas, then notes seconds and accuracy of each validation, and stops at the target.

    Args:
        folder: Where files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[tuple[float, float]] = []
        self.training = 0.0
        self.batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait."""
        wait(self.folder, trainer.global_rank)
        self.start = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self.began = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch's batches are done."""
        self.training += time.perf_counter() - self.began

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the accuracy."""
        accuracy = float(trainer.callback_metrics["val_acc"])
        self.notes.append((time.perf_counter() - self.start, accuracy))
        trainer.should_stop = accuracy >= TARGET

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was noted."""
        if trainer.is_global_zero:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            whole = len(self.notes) * len(data.train_source) / BATCH
            result = {"seconds": self.notes[-1][0], "batch": self.training / whole, "notes": self.notes}
            (self.folder / "result").write_text(json.dumps(result))


def wait(folder: Path, rank: int) -> None:
    """Wait for the quotas."""
    (folder / f"ready{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


def train(run: Run, seed: int, folder: Path) -> None:
    """Train until the accuracy is reached."""
    count = len(run.quotas)
    own_steps = run.kind == "async"  # Each worker makes a step with its own part of the batch.
    strategies: dict[str, Any] = {
        "auto": lambda: "auto",
        "ddp": DDPStrategy,
        "async": lambda: ParameterServerStrategy("async", data_dispatch="dynamic", security="none"),
    }
    seed_everything(seed, verbose=False)
    rate, momentum = (0.05 / count, 0.5) if own_steps else (0.05, 0.9)
    model = ImageClassifier(
        resnet_for_digits(SIZE),
        10,
        optimizer=lambda p: torch.optim.SGD(p, rate, momentum=momentum, weight_decay=0.0005),
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=count,
        strategy=strategies[run.kind](),
        precision=run.precision,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[Accuracy(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DigitsDataModule(batch_size=BATCH // count, seed=seed))


def measure(precision: str, folder: Path) -> None:
    """Profile the network with half a batch, a host's share."""
    wait(folder, 0)
    images = torch.randn(BATCH // 2, 1, 8, 8)
    traced = trace(resnet_for_digits(SIZE))
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()
    with autocast:
        large, small = (profile(traced, images[:size]) for size in (len(images), len(images) // SMALLER))
    combined = from_two_sizes(large, small, has_batch_norm(traced))
    (folder / "profile").write_text(base64.b64encode(pickle.dumps(combined)).decode())
    (folder / "result").write_text("{}")


def main() -> None:
    """Train, or profile."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run")
    options.add_argument("seed", help="or the precision to profile with")
    options.add_argument("folder", type=Path)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.run == "profile":
        measure(arguments.seed, arguments.folder)
    else:
        train(RUNS[arguments.run], int(arguments.seed), arguments.folder)


if __name__ == "__main__":
    main()
