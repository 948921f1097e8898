"""Equal weights for all samples of a step, on whichever rank and in whichever accumulated batch they are."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from cnnstrategies.data.sampling import dealt
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.protocol import facts_of


class SampleWeights(Callback):
    """Weights the loss of each batch by its number of samples, before the backward.

    Without this callback batches count equally, although their sizes may differ: the batches of three ranks with a
    global batch of 64, or accumulated batches. A batch that only repeats samples, so that its rank has a batch at all,
    gets weight 0. If the module's loss has another divisor than the number of samples, and ``loss_weight(targets)``
    returns that divisor, a batch counts by it. With accumulated batches it counts by its samples, because the divisors
    of the next batches are not known yet. Logged losses do not change.

    The callback knows the sizes of batches that are divided by shares: the batches of this package's data modules, and
    all batches under ``ddp_balanced``. A pipeline weights its batches itself.
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
                total = trainer.strategy.reduce(weight.clone(), reduce_op="sum")  # `reduce` works in place.
                factor = torch.as_tensor(weight * sampler.num_replicas / total)
        if isinstance(factor, Tensor) or factor != 1:
            # The loss itself stays unchanged: in manual optimization it is the user's tensor, and backward may need it.
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
