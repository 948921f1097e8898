"""What a run is about to do, in a few lines."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from cnnstrategies.callbacks import panel_rows as panel
from cnnstrategies.callbacks.tables import print_table, relative


class StartPanel(Callback):
    """Prints on rank 0 how the work is divided, when everything is set up and before the first batch.

    Strategy, devices and nodes; the images and their classes; the global batch and what it is made of; the stages of a
    pipeline, or the servers; the parameters of the whole network and of each device; precision and memory format; where
    the results go; and what is different from a run on one device. Validation, test and prediction get fewer lines.

    A strategy may speak for itself: by ``strategy_name``, ``describe(batch_size)``, which returns names and texts,
    ``differences(batch_size)``, which returns lines, and ``device_parameters``, the numbers of parameters that devices
    hold. ``batch_size`` is that of one process, or None where it is not known.
    """

    def __init__(self) -> None:
        self._before = (0, 0)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The whole network is here only before the strategy divides it.
        self._before = panel.count_parameters(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print("Training", trainer, pl_module, trainer.train_dataloader)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print("Validation", trainer, pl_module, trainer.val_dataloaders)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print("Test", trainer, pl_module, trainer.test_dataloaders)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print("Prediction", trainer, pl_module, trainer.predict_dataloaders)

    def _print(self, title: str, trainer: Trainer, module: LightningModule, loader: Any) -> None:
        if trainer.is_global_zero:
            print_table(title, self._rows(trainer, module, loader))

    def _rows(self, trainer: Trainer, module: LightningModule, loader: Any) -> list[panel.Row]:
        strategy, training = trainer.strategy, trainer.state.fn == TrainerFn.FITTING
        size = panel.samples_of(loader, getattr(trainer, "datamodule", None))
        batch = panel.training_batch if training else panel.evaluation_batch
        rows = [
            ("strategy", panel.strategy_name(strategy)),
            ("devices", panel.devices(trainer)),
            *panel.images(trainer),
            batch(trainer, size),
            *(strategy.describe(size) if hasattr(strategy, "describe") else []),
            ("parameters", panel.parameters(trainer, panel.whole_network(trainer, module, self._before))),
            ("precision", panel.precision(trainer, module)),
        ]
        if trainer.ckpt_path is not None:
            rows.append(("checkpoint", relative(str(trainer.ckpt_path))))
        rows += panel.results(trainer)
        if training:
            rows.append(("unlike one device", "\n".join(panel.differences(trainer, module, size)) or "nothing"))
        return rows
