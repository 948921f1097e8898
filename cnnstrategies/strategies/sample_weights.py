"""A callback that makes all samples of a step count equally, although batches may have different sizes."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.sampling import dealt
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.protocol import facts_of


class SampleWeights(Callback):
    """Callback that weights the gradient of each batch by the number of samples in the batch.

    Without this callback all batches of a step count equally, although their sizes may differ: three ranks cannot
    divide a global batch of 64 samples into equal parts, for example. If no samples of a global batch are left for a
    rank, the rank repeats a sample of another rank, and its batch has weight 0. Logged losses do not change.

    A module's loss may be a mean with a divisor other than the number of samples, such as a sum of class weights. If
    the module has a method ``loss_weight(targets)`` that returns this divisor, each batch is weighted by its divisor.
    With gradient accumulation each batch is weighted by its number of samples, because the divisors of later batches
    are not known yet.

    The callback works for batches that are divided by shares: the batches of this package's data modules, and all
    batches under ``ddp_balanced``. The strategy ``hybrid_pipeline`` weights its batches itself.
    """

    weighs_samples = True

    def __init__(self) -> None:
        self._targets: Any = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pair = isinstance(batch, list | tuple) and len(batch) > 1
        self._targets = batch[1] if pair and has_mean_loss(pl_module) else None

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        sampler, weighting = dealt(trainer), facts_of(trainer.strategy).gradient_weighting
        if sampler is None or weighting == "by_sample":
            return
        batch = trainer.fit_loop.batch_idx
        factor: float | Tensor = sampler.weight(batch, trainer.num_training_batches, weighting)
        targets, self._targets = self._targets, None
        if weighting == "equal" and sampler.accumulated == 1 and sampler.num_replicas > 1 and targets is not None:
            weight = pl_module.loss_weight(targets)  # type: ignore[operator]
            if isinstance(weight, Tensor):
                weight = weight.to(loss.dtype) * (sampler.counts(batch)[sampler.rank] > 0)
                # `reduce` overwrites its argument, so it gets a copy.
                total = trainer.strategy.reduce(weight.clone(), reduce_op="sum")
                factor = torch.as_tensor(weight * sampler.num_replicas / total)
        if isinstance(factor, Tensor) or factor != 1:
            # A hook scales the gradient, and the loss itself stays unchanged: in manual optimization the loss is the
            # user's own tensor, and backward may need its value.
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
