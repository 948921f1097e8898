"""Validation accuracy against wall time on the digits, for each mode, with and without a slow worker.

The quickstart's network, optimizer and schedule on 2 workers. The slow worker sleeps after each batch for three times
the processor time that the batch took.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fits import TIME_LIMIT, Clock, digits_classifier  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from ranks import report

from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies import ParameterServerStrategy

TARGET = 0.98
STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(start_method="fork"),
    "sync": lambda: ParameterServerStrategy(start_method="fork"),
    "ssp, 4": lambda: ParameterServerStrategy("ssp", staleness=4, data_dispatch="dynamic", start_method="fork"),
    "async": lambda: ParameterServerStrategy("async", data_dispatch="dynamic", start_method="fork"),
}
COLOURS = {"ddp": "#7F7F7F", "sync": "#4C8BF5", "ssp, 4": "#F2994A", "async": "#27AE60"}


class Accuracy(Callback):
    """Notes the seconds since the first batch and the accuracy of each validation."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.notes: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the accuracy."""
        self.notes.append((time.perf_counter() - self.start, float(trainer.callback_metrics["val_acc"])))
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.notes))


def train(strategy: Any, epochs: int, slow_rank: int | None) -> list[tuple[float, float]]:
    """Seconds and accuracy of each epoch; in a forked process."""
    with tempfile.TemporaryDirectory() as name:
        process = multiprocessing.get_context("fork").Process(
            target=_train, args=(Path(name), strategy, epochs, slow_rank)
        )
        process.start()
        process.join(TIME_LIMIT)
        if process.exitcode != 0:
            raise SystemExit(f"the fit ended with {process.exitcode}:\n{(Path(name) / 'output').read_text()[-4000:]}")
        return [tuple(note) for note in json.loads((Path(name) / "accuracy").read_text())]


def _train(folder: Path, strategy: Any, epochs: int, slow_rank: int | None) -> None:
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    model = digits_classifier([32, 64], epochs)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(),
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=[Accuracy(folder / "accuracy"), Clock(folder, slow_rank)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, DigitsDataModule(batch_size=32))


def draw(curves: dict[tuple[str, bool], list[tuple[float, float]]], path: Path) -> None:
    """Two panels: all workers equal, and one of them slow."""
    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for panel, slow in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        for name in STRATEGIES:
            seconds, accuracies = zip(*curves[name, slow], strict=True)
            best = list(itertools.accumulate(accuracies, max))
            panel.step(seconds, best, where="post", label=name, color=COLOURS[name], linewidth=2)
        panel.axhline(TARGET, color="#BBBBBB", linestyle="--", linewidth=1, zorder=0)
        panel.set_title("one worker at a quarter of its speed" if slow else "equal workers", fontsize=11)
        panel.set_xlabel("seconds")
        panel.set_ylim(0.93, 1.002)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("best validation accuracy so far")
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path)


def main() -> None:
    """Train with each strategy, with and without a slow worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    curves = {
        (name, slow): train(strategy, epochs, 1 if slow else None)
        for slow in (False, True)
        for name, strategy in STRATEGIES.items()
    }
    here = Path(__file__)
    draw(curves, here.with_suffix(".png"))
    rows = [("strategy", "slow worker", f"seconds to {TARGET:.0%}", "seconds in all", "accuracy at the end", "best")]
    for (name, slow), curve in curves.items():
        reached = next((f"{seconds:.1f}" for seconds, accuracy in curve if accuracy >= TARGET), "-")
        accuracies = [accuracy for _, accuracy in curve]
        rows.append(
            (
                name,
                "yes" if slow else "no",
                reached,
                f"{curve[-1][0]:.1f}",
                f"{accuracies[-1]:.4f}",
                f"{max(accuracies):.4f}",
            )
        )
    report(
        here.with_suffix(".md"),
        "Accuracy against time",
        f"{__doc__}\n{epochs} epochs; one run of each.\n\n![curves]({here.with_suffix('.png').name})",
        rows,
    )


if __name__ == "__main__":
    main()
