"""Callback that prints a short summary at the end of fit and draws the curves of loss and accuracy."""

import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from typing_extensions import override

from cnnstrategies.callbacks.tables import print_table, relative, rows_of_callbacks
from cnnstrategies.callbacks.throughput import SamplesPerSecond
from cnnstrategies.models.metric_names import is_of_epochs, less_is_better, worth_showing
from cnnstrategies.strategies.protocol import facts_of

History = Mapping[int, Mapping[str, float]]
PANELS = {"loss": "Loss", "acc": "Accuracy"}  # Keys: parts of the metrics' names. Values: titles of the plots.

EVALUATIONS = {"validate": "Validation summary", "test": "Test summary", "predict": "Prediction summary"}


class TrainingSummary(Callback):
    """Callback that records the metrics of every epoch, and on rank 0 prints a summary at the end of fit.

    Callbacks with a method ``summary_rows`` add rows to the summary, which ``validate``, ``test`` and ``predict`` print
    as well.

    The metrics' curves are saved as ``curves.png`` in the log directory. Without a logger they are not drawn. The
    recorded metrics are saved in checkpoints, so that the curves of a resumed run begin at the first epoch.
    """

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All ranks must execute this line, because reading a metric may run a collective that reduces the metric.
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.history[trainer.current_epoch] = metrics

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # All ranks must execute these two lines: `log_dir` runs a broadcast and `peak_bytes` an all-gather.
        log_dir = trainer.log_dir if trainer.loggers else None
        peaks = peak_bytes(trainer)
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not trainer.is_global_zero or debugging or not self.history:
            return
        if (bar := trainer.progress_bar_callback) is not None:
            bar.teardown(trainer, pl_module, "fit")  # Otherwise the progress bar is printed again below the summary.
        rows = self._rows(trainer)
        rows.append(("peak memory", memory_in_words(peaks, trainer.strategy.root_device.type == "cuda")))
        if log_dir is not None and choose_panels(self.history):
            path = Path(log_dir) / "curves.png"
            draw_curves(self.history, path)
            rows.append(("curves", relative(str(path))))
        print_table("Training summary", rows + rows_of_callbacks(trainer, "summary_rows"))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Below Lightning's table of the metrics.
        rows = rows_of_callbacks(trainer, "summary_rows") if stage in EVALUATIONS and trainer.is_global_zero else []
        if rows:
            print_table(EVALUATIONS[stage], rows)

    def _rows(self, trainer: Trainer) -> list[tuple[str, str]]:
        rows = []
        for name in worth_showing(dict.fromkeys(name for metrics in self.history.values() for name in metrics)):
            values = {epoch: metrics[name] for epoch, metrics in self.history.items() if name in metrics}
            best = min if less_is_better(name) else max
            epoch = best(values, key=lambda epoch: values[epoch])
            last = values[max(values)]
            rows.append((name, f"{last:.4f} at the end, best {values[epoch]:.4f} in epoch {epoch}"))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the callback connector
            if isinstance(callback, SamplesPerSecond) and callback.mean is not None:
                processes = "1 process" if trainer.world_size == 1 else f"{trainer.world_size} processes"
                speed = f"{callback.mean:,.0f}" if callback.mean >= 10 else f"{callback.mean:.2g}"
                rows.append(("samples/s", f"{speed} over {processes}"))
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
            rows.append(("checkpoint", relative(checkpoint.best_model_path)))
        return rows

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = state_dict["history"]


def peak_bytes(trainer: Trainer) -> list[int]:
    """Return the peak memory of each rank in bytes, in rank order. All ranks must call this.

    On a GPU this is the peak of the memory that torch allocated, and otherwise the process's peak resident set size.
    """
    device = trainer.strategy.root_device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks: list[int] = facts_of(trainer.strategy).gather_from_ranks(torch.tensor(peak, device=device)).tolist()
    return peaks


def memory_in_words(peaks: Sequence[int], gpus: bool) -> str:
    """Return a text with the smallest and the largest peak of a rank.

    Args:
        peaks: Peak memory of each rank, in bytes.
        gpus: Whether the ranks compute on GPUs.
    """
    least, most = f"{min(peaks) / 1e6:,.0f}", f"{max(peaks) / 1e6:,.0f}"
    if len(peaks) == 1:
        return f"{most} MB of the {'GPU' if gpus else 'process'}"
    return f"{least} to {most} MB of {len(peaks)} {'GPUs' if gpus else 'processes'}"


def draw_curves(history: History, path: Path) -> None:
    """Draw the curves of all metrics in the panels of :func:`choose_panels`, and save the figure."""
    panels = choose_panels(history)
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            epochs = [epoch for epoch in sorted(history) if name in history[epoch]]
            axes.plot(epochs, [history[epoch][name] for epoch in epochs], marker=".", label=name)
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def choose_panels(history: History) -> dict[str, list[str]]:
    """Return the names of the metrics of each panel. The keys are the panels' titles.

    Losses have one panel and accuracies have another panel. If neither losses nor accuracies were logged, one panel has
    all metrics. If no metric was logged, the result is empty.
    """
    logged = list(dict.fromkeys(name for metrics in history.values() for name in metrics if is_of_epochs(name)))
    panels = {}
    for word, title in PANELS.items():
        usual = [f"{stage}_{word}" for stage in ("train", "val")]
        names = [name for name in usual if name in logged] or [name for name in logged if word in name.lower()]
        if names:
            panels[title] = names
    return panels or ({"Metrics": logged} if logged else {})
