"""Fits under `hybrid_pipeline`, in both orders of forwards and backwards, against one device.

Every rank runs the module's training step, loss, metrics, clipping and optimizer for the whole batch, and operations on
values of other ranks follow rules. This costs time for each operation outside of the network. In the order gpipe each
stage keeps the activations of all microbatches. The order 1f1b needs a module that declares its loss; each backward
then checks that the step has trained the declared loss.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from networks import images, resnet_blocks
from ranks import report
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "parameter_server"))

from fits import Clock, in_fork

from cnnstrategies.strategies import HybridPipelineStrategy

TIME_LIMIT = 300
BATCH, CLASSES, CUT = 32, 10, "6"


class Module(LightningModule):
    """A module that declares its loss, logs the loss and the accuracy, and clips by the norm of all gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = resnet_blocks()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Log the loss and the accuracy."""
        outputs = self.network(batch[0])
        loss = self.loss(outputs, batch[1])
        self.log_dict({"loss": loss, "accuracy": (outputs.argmax(1) == batch[1]).float().mean()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def pipeline(schedule: Literal["gpipe", "1f1b"]) -> HybridPipelineStrategy:
    """Return a pipeline of two stages."""
    return HybridPipelineStrategy(replicas=[1, 1], cuts=[CUT], microbatches=4, schedule=schedule, start_method="fork")


CONTESTANTS: dict[str, tuple[Callable[[], Any], int]] = {
    "one device": (lambda: "ddp_fork", 1),
    "gpipe": (partial(pipeline, "gpipe"), 2),
    "1f1b": (partial(pipeline, "1f1b"), 2),
}


def train(folder: Path, name: str, steps: int) -> None:
    """Train; the ranks write their notes into the folder."""
    torch.set_num_threads(1)
    strategy, devices = CONTESTANTS[name]
    data = TensorDataset(*images(32, BATCH * steps, CLASSES))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        max_epochs=1,
        callbacks=[Clock(folder)],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, BATCH))


def main() -> None:
    """Measure in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    measured: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, (_, devices) in CONTESTANTS.items():
            fit, _ = in_fork(partial(train, name=name, steps=options.steps), devices, TIME_LIMIT)
            measured[name].append(fit.seconds_per_step())
            print(name, f"{measured[name][-1] * 1e3:.1f} ms", flush=True)
    rows = [("order", "ms for a step", "times one device's, median of the rounds (smallest to largest)")]
    for name, times in measured.items():
        ratios = [time / other for time, other in zip(times, measured["one device"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((name, f"{statistics.median(times) * 1e3:.1f}", spread))
    report(
        Path(__file__).with_suffix(".md"),
        "Fits under a pipeline, and on one device",
        f"{__doc__}\nResNet-20 with {BATCH} images of 32 x 32, two stages, four microbatches, AdamW, clipping by norm, "
        f"two logged values, {options.steps} steps, {options.rounds} rounds in turns.",
        rows,
    )


if __name__ == "__main__":
    main()
