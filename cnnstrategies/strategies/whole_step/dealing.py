"""Shares of the microbatches, and weights of accumulated batches, when every rank has the whole batch."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from cnnstrategies.data.sampling import dealt
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.shares import Deals


def use_shares(trainer: Any, transport: Transport, deals: Deals | None) -> None:
    """Let the replicas divide the microbatches of the next training batch by the shares of this batch.

    All ranks must call this before they transfer a batch to the device.

    Args:
        trainer: The trainer.
        transport: Connections of this rank, whose placement has the shares.
        deals: The shares of all batches; None if shares are equal.
    """
    if deals is None or not trainer.training:
        return
    shares = deals.at(trainer.current_epoch, trainer.fit_loop.batch_idx + 1)
    if shares != transport.placement.shares:
        transport.placement = replace(transport.placement, shares=shares)


def weigh_batch(trainer: Any, loss: Tensor) -> None:
    """Weight the gradient of an accumulated batch by the batch's number of samples, if shares divide the batches.

    The loss itself does not change.

    Args:
        trainer: The trainer.
        loss: The loss of the whole batch.
    """
    sampler = dealt(trainer)
    if sampler is None or not loss.requires_grad:
        return
    factor = sampler.weight(trainer.fit_loop.batch_idx, trainer.num_training_batches, "by_sample")
    if factor != 1:
        loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
