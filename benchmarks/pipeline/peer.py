"""The peer: a hand-written step over torch.distributed.pipelining's Schedule1F1B."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Peer:
    """One rank's part of a pipeline of two stages.

    Args:
        network: The whole network, in a row.
        cut: Index of the second stage's first child.
        rank: The stage that this rank runs.
        microbatches: Microbatches of a step.
        loss: Mean loss of a microbatch.
    """

    def __init__(
        self, network: nn.Sequential, cut: int, rank: int, microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        children = list(network)
        self.module = nn.Sequential(*(children[:cut] if rank == 0 else children[cut:]))
        self.rank = rank
        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

    def step(self, images: Tensor, targets: Tensor) -> float | None:
        """Forward and backward of a batch; the loss on the last stage."""
        self.module.zero_grad(set_to_none=True)
        if self.rank == 0:
            self.schedule.step(images)
            return None
        losses: list[Tensor] = []
        self.schedule.step(target=targets, losses=losses)
        return float(torch.stack(losses).detach().mean())
