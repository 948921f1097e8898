"""Callback that prunes the weights of a network during training."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.nn.utils import prune
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of

PRUNED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
AVERAGING = (WeightAveraging, StochasticWeightAveraging)


class Pruning(ModelPruning):
    """Callback that sets the smallest weights to zero after an epoch, and keeps them zero in the following epochs.

    The method is global magnitude pruning (Han et al., "Learning both Weights and Connections for Efficient Neural
    Networks", NeurIPS 2015), as implemented by Lightning's callback. The weights of convolutions and linear layers are
    pruned; biases and normalisations are not. Checkpoints contain ordinary weights, some of which are zero, under the
    network's own parameter names. A run that is resumed from a checkpoint keeps the zeros. Rank 0 chooses the weights
    to prune, and all ranks prune these weights even if the ranks' weights differ.

    Args:
        amount: Fraction of the weights that is set to zero, in (0, 1).
        epoch: Epoch after which the weights are set to zero. The network trains without pruning in epochs 0 to
            ``epoch``.

    Raises:
        ConfigurationError: ``amount`` is outside (0, 1), fit ends before the pruned network is trained, the network has
            no convolution or linear layer, or the run uses weight averaging or a strategy that shards the parameters.
    """

    def __init__(self, amount: float = 0.8, epoch: int = 9) -> None:
        if not 0 < amount < 1:
            raise ConfigurationError(f"amount={amount} is outside (0, 1); give a number such as 0.5")
        if epoch < 0:
            raise ConfigurationError(f"epoch={epoch} is negative; 0 prunes after the first epoch")
        super().__init__(
            "l1_unstructured",
            parameter_names=["weight"],
            use_global_unstructured=True,
            amount=amount,
            use_lottery_ticket_hypothesis=False,
            verbose=1,
        )
        self.epoch = epoch
        self.pruned = False

    @staticmethod
    @override
    def sanitize_parameters_to_prune(
        pl_module: LightningModule,
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
    ) -> Sequence[tuple[nn.Module, str]]:
        """Return the weights of the convolutions and linear layers.

        Lightning's own method would also return the weights of normalisation layers.
        """
        return [(module, "weight") for module in _layers(pl_module)]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not _layers(pl_module):
            raise ConfigurationError(
                f"Pruning: {type(pl_module).__name__} has no convolution or linear layer to prune; remove the callback"
            )
        if facts_of(trainer.strategy).shards_parameters:
            raise ConfigurationError(
                f"Pruning needs all weights on every rank, but {type(trainer.strategy).__name__} shards them: set "
                "trainer.strategy=ddp"
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by the callback connector
        averaging = next((c for c in callbacks if isinstance(c, AVERAGING)), None)
        if averaging is not None:
            raise ConfigurationError(
                f"Pruning and {type(averaging).__name__} cannot be used together, because Pruning replaces the "
                "parameters that would be averaged: remove one of the two callbacks"
            )
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pruned:
            # A checkpoint contains the weights but not the masks. The pruned weights are the weights that are zero, so
            # the masks are computed from the weights.
            for layer in _layers(pl_module):
                prune.custom_from_mask(layer, "weight", layer.weight != 0)  # type: ignore[no-untyped-call]
            return
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not debugging and trainer.max_epochs is not None and 0 <= trainer.max_epochs <= self.epoch + 1:
            raise ConfigurationError(
                f"Pruning(epoch={self.epoch}) leaves no epoch to train the pruned network, because "
                f"trainer.max_epochs={trainer.max_epochs}: raise trainer.max_epochs, or give Pruning a smaller epoch"
            )

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.pruned or trainer.current_epoch < self.epoch:
            return
        super().on_train_epoch_end(trainer, pl_module)
        for layer in _layers(pl_module):
            mask = layer.get_buffer("weight_mask")
            # In the parameter server's mode `local` the workers' weights, and therefore their masks, may differ. The
            # masks are buffers, which some strategies do not synchronise, so all ranks get the masks of rank 0.
            mask.copy_(trainer.strategy.broadcast(mask.bool()))
        self.pruned = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"pruned": self.pruned}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pruned = state_dict["pruned"]


def _layers(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, PRUNED)]
