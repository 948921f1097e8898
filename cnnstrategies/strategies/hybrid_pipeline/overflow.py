"""One decision of all stages to skip a step whose gradients have overflown in half precision."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp


class Overflow:
    """Has every rank find an overflow that one of them has, so that all skip the step and lower the scale.

    Args:
        device: Where the gradients are.
        world_size: Number of ranks.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._found = torch.zeros((), device=device)
        self._world_size = world_size

    def share(self, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Look through the gradients of a batch; a collective, once for each step of the optimizer.

        Args:
            gradients: They are made infinite where another rank has found an overflow.
            more: Another batch follows before the optimizer's step: what was found is kept until then.
        """
        own = [gradient for gradient in gradients if gradient is not None]
        if own:
            finite = torch.isfinite(torch.nn.utils.get_total_norm(own, float("inf")))
            self._found = torch.maximum(self._found, 1.0 - finite.float())
        if more:
            return
        if self._world_size > 1:
            dist.all_reduce(self._found, op=ReduceOp.MAX)
        if own:
            own[0].masked_fill_(self._found > 0, float("inf"))
        self._found = torch.zeros_like(self._found)
