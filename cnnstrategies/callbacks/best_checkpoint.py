"""Checkpoint callback for `best.ckpt`, the checkpoint of the epoch with the best value of a metric."""

from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.metric_names import USUAL, less_is_better, not_logged

AUTO = "auto"


class BestCheckpoint(ModelCheckpoint):
    """ModelCheckpoint of Lightning that can choose the monitored metric itself, from the metrics that the module logs.

    Args:
        dirpath: Folder of the checkpoints; by default ``checkpoints`` in the log directory.
        filename: Name of the file; it may contain metrics, as in ``{epoch}-{val_loss:.2f}``.
        monitor: Name of the metric that decides which epoch is the best. ``auto`` takes the first of ``val_acc``,
            ``val_miou``, ``val_map``, ``val_mae`` and ``val_loss`` that the module logs. With null, or if the module
            logs none of these metrics, the checkpoint of the last epoch is kept.
        mode: Whether the smallest (``min``) or the largest (``max``) value is the best. ``auto`` takes the smallest if
            the metric's name contains ``loss``, ``error``, or the abbreviation of an error measure, such as ``mae``.
        **kwargs: Other arguments of :class:`~lightning.pytorch.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str | None = "best",
        monitor: str | None = AUTO,
        mode: Literal["auto", "min", "max"] = "auto",
        **kwargs: Any,
    ) -> None:
        self._monitor_option = monitor
        self._mode_option = mode
        # Without a metric, ModelCheckpoint would refuse `save_top_k` > 1, so its constructor gets a provisional metric.
        name = USUAL[0] if monitor == AUTO else monitor
        super().__init__(dirpath, filename, name, mode=self._mode_of(name), **kwargs)
        if monitor == AUTO:
            self.monitor = None

    @property
    @override
    def state_key(self) -> str:
        # Lightning's own key contains the monitored metric. With `auto` the metric is not yet known when a run is
        # resumed, so this key contains the option's value instead.
        return f"{type(self).__qualname__}{{'monitor': {self._monitor_option!r}, 'filename': {self.filename!r}}}"

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._monitor_option == AUTO and state_dict.get("monitor") is not None:
            self._set_monitor(state_dict["monitor"])
        super().load_state_dict(state_dict)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._choose_monitor(trainer)
        if self.monitor not in (None, *trainer.callback_metrics) and not trainer.enable_validation:
            raise self._not_logged_error(trainer)
        try:
            super().on_train_epoch_end(trainer, pl_module)
        except MisconfigurationException as error:
            raise self._not_logged_error(trainer) from error

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._choose_monitor(trainer)
        try:
            super().on_validation_end(trainer, pl_module)
        except MisconfigurationException as error:
            raise self._not_logged_error(trainer) from error

    def _choose_monitor(self, trainer: Trainer) -> None:
        if self._monitor_option == AUTO and self.monitor is None:
            logged = trainer.callback_metrics
            if (name := next((name for name in USUAL if name in logged), None)) is not None:
                self._set_monitor(name)

    def _set_monitor(self, name: str) -> None:
        self.monitor = name
        self.mode = self._mode_of(name)
        self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)

    def _mode_of(self, name: str | None) -> str:
        if self._mode_option != "auto":
            return self._mode_option
        return "min" if name is None or less_is_better(name) else "max"

    def _not_logged_error(self, trainer: Trainer) -> ConfigurationError:
        message = not_logged("checkpoint.monitor", self.monitor, trainer.callback_metrics)
        return ConfigurationError(f"{message}; or leave checkpoint.monitor out")
