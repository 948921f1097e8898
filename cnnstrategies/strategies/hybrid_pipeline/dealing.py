"""Shares of the microbatches among the replicas of a stage."""

from dataclasses import replace
from typing import Any

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
