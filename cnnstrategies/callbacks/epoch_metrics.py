"""Callback that saves the metrics of an unfinished epoch in checkpoints."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

KEY = "epoch_metrics"

State = dict[str, Tensor | list[Tensor]]


class EpochMetrics(Callback):
    """Callback that saves the state of an epoch's metrics in checkpoints, for runs that are resumed within the epoch.

    Without the saved state, the training loss and accuracy of a resumed epoch would cover only the batches after the
    checkpoint. The state of the module's torchmetrics is reduced over all ranks before it is saved. When a run is
    resumed, rank 0 loads the reduced state and the other ranks start from zero, so the resumed run may have a different
    number of ranks.
    """

    def __init__(self) -> None:
        self._saved: dict[str, State] = {}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # A checkpoint that is saved during a validation does not contain metrics. A resumed run starts this validation
        # again from its first batch, so batches before the checkpoint would count twice.
        if trainer.training:
            checkpoint[KEY] = {
                name: _over_all_ranks(metric) for name, metric in _metrics(pl_module) if metric.update_called
            }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get(KEY, {})

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._saved and batch_idx > 0:
            for name, metric in _metrics(pl_module):
                shared = metric.distributed_available_fn is not None and metric.distributed_available_fn()
                if name in self._saved and (trainer.is_global_zero or not shared):
                    for attribute, value in self._saved[name].items():
                        setattr(metric, attribute, _moved(value, metric.device))
        self._saved = {}


def _metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, Metric)]


def _over_all_ranks(metric: Metric) -> State:
    """Return a metric's state, reduced over all ranks and copied to the CPU. All ranks must call this."""
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn, process_group=metric.process_group):
        return {name: _moved(value, "cpu") for name, value in metric.metric_state.items()}


def _moved(value: Tensor | list[Tensor], device: Any) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    return [tensor.detach().clone().to(device) for tensor in value]
