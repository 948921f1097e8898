"""A run that is started again goes on in its loggers' runs, and in the lines of its metrics.csv."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from cnnstrategies.cluster.run_folder import IDS, read_record, write_record
from cnnstrategies.runtime.loggers import KeptCSVLogger


class RunRecord(Callback):
    """Says in ``run.json``, beside the checkpoints, whose they are and which runs of its loggers are this one's.

    What is logged is on the disk when a checkpoint is: after a restart nothing is missing from before it, and lines of
    metrics.csv from after it, which will be written again, are removed.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folders = [
            Path(callback.dirpath)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath)
        ]
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            return
        ids = {}
        for number, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in IDS:
                _ = logger.experiment  # type: ignore[attr-defined]  # Begins the run, which has an id from then on.
                ids[str(number)] = str(logger.version)
        for folder in dict.fromkeys(folders):
            write_record(folder, {**read_record(folder), "run": self.name, "loggers": ids})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                if isinstance(logger, KeptCSVLogger):
                    logger.drop_lines_from(trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _flush(trainer)  # Lightning logs an epoch's means after its checkpoint.

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        _flush(trainer)


def _flush(trainer: Trainer) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, KeptCSVLogger | TensorBoardLogger):
            logger.save()
