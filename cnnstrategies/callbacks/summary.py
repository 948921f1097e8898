"""A short summary and the curves of loss and accuracy at the end of fit."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from cnnstrategies.callbacks.curves import choose_panels, draw_curves
from cnnstrategies.callbacks.peak_memory import in_words, peak_bytes
from cnnstrategies.callbacks.tables import print_table, relative
from cnnstrategies.callbacks.throughput import SamplesPerSecond
from cnnstrategies.models.metric_names import less_is_better, worth_showing


class TrainingSummary(Callback):
    """Keeps every epoch's metrics; when fit ends, rank 0 prints a summary and draws ``curves.png``.

    The figure lies in the log directory; without a logger none is drawn. The history is part of the checkpoint, so
    that the curves of a resumed run start at its first epoch.
    """

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Reading the metrics may reduce them over the ranks, so every rank reads.
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.history[trainer.current_epoch] = metrics

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_dir = trainer.log_dir if trainer.loggers else None  # A broadcast: every rank asks.
        held = peak_bytes(trainer)  # And so it is here.
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not trainer.is_global_zero or debugging or not self.history:
            return
        if (bar := trainer.progress_bar_callback) is not None:
            bar.teardown(trainer, pl_module, "fit")  # Else the terminal shows its last state once more, below.
        rows = self._rows(trainer)
        rows.append(("peak memory", in_words(held, trainer.strategy.root_device.type == "cuda")))
        if log_dir is not None and choose_panels(self.history):
            path = Path(log_dir) / "curves.png"
            draw_curves(self.history, path)
            rows.append(("curves", relative(str(path))))
        print_table("Training summary", rows)

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
                rows.append(("samples/s", f"{callback.mean:,.0f} over {processes}"))
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
