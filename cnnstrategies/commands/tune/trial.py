"""The program of a rank in a trial of ``tune`` that uses the same batch in all steps, so that no loading is measured.

Only :class:`cnnstrategies.planning.tune.trial.Trial` runs this module.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from cnnstrategies.callbacks.compute_settings import ComputeSettings
from cnnstrategies.commands.run.trainer import as_list
from cnnstrategies.commands.tune.step_control import StepControl, TrialCLI, run_rank
from cnnstrategies.errors import ConfigurationError

STEPS_OF_AN_EPOCH = 1000  # Number of steps in an epoch of a trial.


class OneBatch(Dataset[Any]):
    """Dataset that returns a stored batch for every list of indices.

    Args:
        batch: The batch.
        size: Number of samples in the batch.
    """

    def __init__(self, batch: Any, size: int) -> None:
        self.batch = batch
        self.size = size

    def __len__(self) -> int:
        return self.size * STEPS_OF_AN_EPOCH * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.batch


class TrialControl(StepControl):
    """Callback that makes the steps that a command requests, all with one batch.

    After the steps it reports their duration and the losses of the first steps of the training.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        source: Any = trainer.datamodule or pl_module  # type: ignore[attr-defined]
        loader = source.train_dataloader()
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"tune needs a DataLoader, but train_dataloader returns {type(loader).__name__}: return a DataLoader"
            )
        batch = next(iter(loader))
        size = int(loader.batch_size or 1)
        source.train_dataloader = lambda: DataLoader(
            OneBatch(batch, size), size, collate_fn=lambda made: made, drop_last=True
        )

    @override
    def execute(self, command: Mapping[str, Any]) -> None:
        self._left = command["steps"]
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._left:
            return
        self._left -= 1
        if self.note_loss(outputs):
            # Learning rate 0 keeps the gradients from shrinking further. After many steps on one batch the gradients
            # would otherwise be denormal numbers, with which CPUs compute slowly.
            for group in itertools.chain.from_iterable(optimizer.param_groups for optimizer in trainer.optimizers):
                group["lr"] = 0.0
        if self._left:
            return
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize()
        self.say({"seconds": time.perf_counter() - self._started, "losses": self._losses})


class OneBatchCLI(TrialCLI):
    """Command line of a rank that trains on the same batch in all steps.

    The rank has no loggers, saves no checkpoints and does not validate. Of the configuration's callbacks, only
    ComputeSettings is used.
    """

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        trainer = self.config.fit.trainer
        trainer.logger = trainer.enable_checkpointing = False
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init.fit
        kept = [callback for callback in as_list(config.trainer.callbacks) if isinstance(callback, ComputeSettings)]
        config.trainer.callbacks = kept
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks[:] = [*kept, TrialControl()]  # type: ignore[attr-defined]
        return trainer


def main() -> None:
    """Run this process as a rank of a trial with the same batch in all steps."""
    run_rank(OneBatchCLI)


if __name__ == "__main__":
    main()
