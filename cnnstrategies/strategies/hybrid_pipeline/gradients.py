"""How the stages' gradients enter Lightning: with the loss, and where all stages count, clipping and overflow."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ReduceOp
from torch.optim import Optimizer


class HandOver(torch.autograd.Function):
    """A loss whose backward gives the parameters gradients that are already known.

    So Lightning's own backward, with its accumulation, loss scale and hooks, runs as ever.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        """Return the loss; the gradients of ``scale`` times it for each parameter are used up."""
        ctx.gradients = gradients
        ctx.scale = scale
        return loss.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        """The gradients, times what Lightning did to the loss."""
        factor = grad_outputs[0] / ctx.scale  # type: ignore[attr-defined]
        gradients = ctx.gradients  # type: ignore[attr-defined]
        ctx.gradients = None  # type: ignore[attr-defined]
        return None, None, None, *(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


def hand_over(
    loss: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, parameters: Sequence[nn.Parameter]
) -> Tensor:
    """The loss that Lightning goes backward from: see :class:`HandOver`; a stage that is frozen has nothing to get."""
    if not parameters:
        return loss.detach().clone().requires_grad_()
    result: Tensor = HandOver.apply(loss, gradients, scale, *parameters)
    return result


def clip_by_joint_norm(optimizer: Optimizer, clip_val: int | float, counts: bool, device: torch.device) -> None:
    """Clip this stage's gradients by the norm over those of all stages; a collective.

    The gradients of one replica of each stage count.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if counts and parameters:
        squares = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).double() ** 2
    dist.all_reduce(squares)
    if parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, squares.sqrt().to(parameters[0].dtype))


class Overflow:
    """Has every rank find an overflow that one of them has, so that all skip the step and lower the scale."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._found = torch.zeros((), device=device)
        self._world_size = world_size

    def share(self, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Look through the gradients of a batch; a collective, once for each step of the optimizer.

        They are made infinite where another rank has found an overflow. Where there is ``more`` before the optimizer's
        step, what was found is kept until then.
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
