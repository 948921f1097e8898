"""Fits under `hybrid_pipeline`, in both orders of forwards and backwards, against one device.

Every rank runs the module's training step, loss, metrics, clipping and optimizer for the whole batch, and operations on
values of other ranks follow rules. This costs time for each operation outside of the network. In the order gpipe each
stage keeps the activations of all microbatches. The order 1f1b needs a module that declares its loss; each backward
then checks that the step has trained the declared loss.

The processor time outside of the network is that of a rank's main thread, from the end of a step to the end of the
next, without the forwards and backwards of the network or of the rank's stage. It contains the loading of a batch, the
loss, the logs, clipping and the optimizer, and in a pipeline also the rules, the messages and the sending of
activations.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from networks import images, resnet_blocks
from ranks import report
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1] / "parameter_server"))

from fits import Clock, in_fork

from cnnstrategies.pipeline import whole_batch
from cnnstrategies.pipeline.division import Division
from cnnstrategies.strategies import HybridPipelineStrategy

TIME_LIMIT = 300
BATCH, CLASSES, CUT = 32, 10, "6"
WARM_UP = 10  # Steps that do not count for the processor time.


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


class OutsideNetwork(Callback):
    """Notes the processor time of each step outside of the network, in a file for each rank.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside, self._is_inside = 0.0, False
        self._notes: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the forwards and backwards of the network, or of the stage."""
        network: Any = pl_module.network
        strategy: Any = trainer.strategy
        if isinstance(strategy, HybridPipelineStrategy):
            Division.run = self._timed(Division.run)  # type: ignore[method-assign]
            whole_batch.gradients_of = self._timed(whole_batch.gradients_of)  # type: ignore[attr-defined]
        else:
            network.forward, strategy.backward = self._timed(network.forward), self._timed(strategy.backward)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Note the time."""
        self._notes.append(time.thread_time() - self._inside)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what was noted."""
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(self._notes))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, start = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False
                self._inside += time.thread_time() - start

        return timed


# As for `Clock`: its hooks do not look at weights.
OutsideNetwork.__module__ = "cnnstrategies.clock"


def pipeline(schedule: Literal["gpipe", "1f1b"]) -> HybridPipelineStrategy:
    """Return a pipeline of two stages."""
    return HybridPipelineStrategy(replicas=[1, 1], cuts=[CUT], microbatches=4, schedule=schedule, start_method="fork")


CONTESTANTS: dict[str, tuple[Callable[[], Any], int]] = {
    "one device": (lambda: "ddp_fork", 1),
    "gpipe": (partial(pipeline, "gpipe"), 2),
    "1f1b": (partial(pipeline, "1f1b"), 2),
}


def train(folder: Path, name: str, steps: int, processor: Path) -> None:
    """Train; the ranks write their notes into the folders."""
    torch.set_num_threads(1)
    strategy, devices = CONTESTANTS[name]
    data = TensorDataset(*images(32, BATCH * steps, CLASSES))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        max_epochs=1,
        callbacks=[Clock(folder), OutsideNetwork(processor)],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(data, BATCH))


def median_step(ends: list[float]) -> float:
    """Return the median difference of consecutive times, after the first steps."""
    return statistics.median(end - start for start, end in itertools.pairwise(ends[WARM_UP:]))


def in_ms(seconds: list[float]) -> str:
    """Return times as text."""
    return ", ".join(f"{value * 1e3:.1f}" for value in seconds)


def main() -> None:
    """Measure in turns, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    measured: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    outside: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}  # For each round and rank.
    for _ in range(options.rounds):
        for name, (_, devices) in CONTESTANTS.items():
            with tempfile.TemporaryDirectory() as directory:
                run = partial(train, name=name, steps=options.steps, processor=Path(directory))
                fit, _ = in_fork(run, devices, TIME_LIMIT)
                notes = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(devices)]
            measured[name].append(fit.seconds_per_step())
            outside[name].append([median_step(of_rank) for of_rank in notes])
            print(name, f"{measured[name][-1] * 1e3:.1f} ms", in_ms(outside[name][-1]), flush=True)
    rows = [
        (
            "order",
            "ms for a step",
            "times one device's, median of the rounds (smallest to largest)",
            "processor ms for a step outside of the network, on each rank",
        )
    ]
    for name, times in measured.items():
        ratios = [time / other for time, other in zip(times, measured["one device"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        of_ranks = [statistics.median(of_rank) for of_rank in zip(*outside[name], strict=True)]
        rows.append((name, f"{statistics.median(times) * 1e3:.1f}", spread, in_ms(of_ranks)))
    report(
        Path(__file__).with_suffix(".md"),
        "Fits under a pipeline, and on one device",
        f"{__doc__}\nResNet-20 with {BATCH} images of 32 x 32, two stages, four microbatches, AdamW, clipping by norm, "
        f"two logged values, {options.steps} steps, {options.rounds} rounds in turns.",
        rows,
    )


if __name__ == "__main__":
    main()
