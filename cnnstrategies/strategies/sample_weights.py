"""Each sample of a step counts as much as any other, whichever rank has it and in which of accumulated batches."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.sampling import dealt
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.protocol import facts_of


class SampleWeights(Callback):
    """Weighs the loss of each batch by its samples, before its backward.

    Ranks whose batches differ by a sample, as those of a global batch of 64 on three, would else count as much as each
    other, and so would accumulated batches. A batch of samples that are there only so that its rank is not without one
    counts nothing. Where the module's loss is divided by something else, and says so by ``loss_weight(targets)`` as a
    pipeline asks it, a batch counts by that; not where batches are accumulated, of which the next are not known. What
    is logged stays as it is.

    It knows what is dealt by shares: what the data modules of this package load, and all under ``ddp_balanced``. A
    pipeline weighs its batches itself.
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
                of_all = trainer.strategy.reduce(weight.clone(), reduce_op="sum")  # in place
                factor = torch.as_tensor(weight * sampler.num_replicas / of_all)
        if isinstance(factor, Tensor) or factor != 1:
            # Not in place: in manual optimization the loss is the user's own, and its backward may need its value.
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
