"""Pruning in the middle of a run, with the accuracy before and after."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

PRUNED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


class Pruning(ModelPruning):
    """Sets the smallest weights to zero after one epoch and trains the rest on.

    Global magnitude pruning (Han et al., "Learning both Weights and Connections for Efficient Neural Networks",
    NeurIPS 2015) of the weights of convolutions and linear layers, with Lightning's callback; biases and
    normalisation stay. Checkpoints hold plain weights with real zeros under the network's own names. Every rank has
    the same weights after a step, so every rank prunes the same ones. When fit ends, the accuracy of the dense and
    of the pruned network is printed.

    Args:
        amount: Share of the weights that is set to zero, in (0, 1).
        epoch: Epoch after which they are; the dense network trains in epochs 0 to ``epoch``.
        monitor: The metric that is printed.

    Raises:
        ConfigurationError: ``amount`` is outside (0, 1), or fit ends before ``epoch``.
    """

    def __init__(self, amount: float = 0.8, epoch: int = 9, monitor: str = "val_acc") -> None:
        if not 0 < amount < 1:
            raise ConfigurationError(f"amount={amount} is outside (0, 1); 0.5 to 0.9 is usual")
        super().__init__(
            "l1_unstructured",
            parameter_names=["weight"],
            use_global_unstructured=True,
            amount=amount,
            apply_pruning=lambda current: current == epoch,
            use_lottery_ticket_hypothesis=False,
        )
        self.amount = amount
        self.epoch = epoch
        self.monitor = monitor
        self.before: float | None = None

    @staticmethod
    @override
    def sanitize_parameters_to_prune(
        pl_module: LightningModule,
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
    ) -> Sequence[tuple[nn.Module, str]]:
        """The weights of the convolutions and linear layers; Lightning would take normalisation as well."""
        return [(module, "weight") for module in pl_module.modules() if isinstance(module, PRUNED)]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= self.epoch + 1:
            raise ConfigurationError(
                f"Pruning(epoch={self.epoch}) comes after the last of {trainer.max_epochs} epochs: raise "
                "trainer.max_epochs or lower epoch, so that the pruned network is trained too"
            )

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch and self.monitor in trainer.callback_metrics:
            self.before = float(trainer.callback_metrics[self.monitor])
        super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        weights = [module.weight for module in pl_module.modules() if isinstance(module, PRUNED)]
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        total = sum(weight.numel() for weight in weights)
        after = trainer.callback_metrics.get(self.monitor, torch.nan)
        before: Any = "unknown" if self.before is None else f"{self.before:.4f}"
        rank_zero_info(
            f"Pruned {zeros:,} of {total:,} weights ({zeros / total:.1%}); {self.monitor}: {before} before, "
            f"{float(after):.4f} after"
        )
