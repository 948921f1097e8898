"""Metrics of an interrupted epoch, in its checkpoint."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

KEY = "epoch_metrics"

State = dict[str, Tensor | list[Tensor]]


class EpochMetrics(Callback):
    """Saves the state of an epoch's metrics in checkpoints, so that a run resumed within the epoch continues them.

    Otherwise the training loss and accuracy of such an epoch would cover only its last batches. The state of the
    module's metrics (torchmetrics) is combined over all ranks before it is saved. On resuming, rank 0 loads it and the
    other ranks start from zero, so the number of ranks may have changed.
    """

    def __init__(self) -> None:
        self._saved: dict[str, State] = {}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # During a validation the metrics also include those of the validation, which a resumed run starts again.
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
    """Return a metric's state combined over all ranks, on the CPU; a collective."""
    with metric.sync_context(dist_sync_fn=metric.dist_sync_fn, process_group=metric.process_group):
        return {name: _moved(value, "cpu") for name, value in metric.metric_state.items()}


def _moved(value: Tensor | list[Tensor], device: Any) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return value.detach().clone().to(device)
    return [tensor.detach().clone().to(device) for tensor in value]
