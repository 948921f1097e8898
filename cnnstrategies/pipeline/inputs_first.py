"""A backward that computes the gradients of a stage's inputs first, for which another stage waits, then its weights'.

As in zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2024), but in one run of autograd's graph:
nothing runs twice, and gradients are added up, and hooks called, where they always are. Each convolution and each
linear layer becomes two nodes of the graph. That of its inputs hands what it has to that of its weights, which was made
before all others; of the nodes that are ready, autograd runs the newest first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cnnstrategies._torch_private import convolution_backward

Options = tuple[Any, ...] | None  # of a convolution after the bias; None for a linear layer
Box = list[tuple[Tensor, Tensor, Options]]  # a layer's inputs, and the gradient of its outputs


class InputsFirst(TorchFunctionMode):
    """While it is active, the forward makes such nodes.

    Only of what is sure to be a module's own weights, at their first use; everything else stays as it is.

    Args:
        module: The stage.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._unused: dict[int, tuple[Box, Tensor, Tensor, Tensor | None]] = {}
        for part in module.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                own = dict(part.named_parameters(recurse=False))
                weight, bias = own.get("weight"), own.get("bias")
                if weight is not None and type(weight) is nn.Parameter and id(weight) not in self._unused:
                    box: Box = []
                    token = _Weights.apply(box, weight, bias)
                    if token.requires_grad:
                        self._unused[id(weight)] = box, token, weight, bias

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        if not kwargs and func in (torch.conv2d, F.linear) and self._is_plain(*args):
            inputs, weight, bias, *options = args if len(args) > 2 else (*args, None)
            box, token, _, own_bias = self._unused[id(weight)]
            if bias is own_bias:
                del self._unused[id(weight)]
                kind = inputs.device.type
                if torch.is_autocast_enabled(kind) and inputs.dtype != torch.float64:
                    inputs = inputs.to(torch.get_autocast_dtype(kind))
                rest = _in_full(*options) if func is torch.conv2d else None
                return _Inputs.apply(box, token, inputs, weight, bias, rest)
        return func(*args, **(kwargs or {}))

    def _is_plain(self, inputs: Any, weight: Any = None, *options: Any) -> bool:
        return (
            id(weight) in self._unused
            and type(inputs) is Tensor
            and inputs.requires_grad
            and (inputs.ndim == 4 if weight.ndim == 4 else inputs.ndim >= 2)
            and not any(isinstance(option, str) for option in options)
        )


class _Weights(torch.autograd.Function):
    """A layer's weights and bias; its value stands for them, and has the gradient 0."""

    @staticmethod
    def forward(ctx: Any, box: Box, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.box = box
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *zero: Tensor) -> tuple[Any, ...]:
        (weight,) = ctx.saved_tensors
        inputs, gradient, options = ctx.box.pop()
        _, *wanted = ctx.needs_input_grad
        if options is not None:
            _, *found = convolution_backward(gradient, inputs, weight, (False, *wanted), *options)
        else:
            rows = gradient.flatten(0, -2)
            found = [
                rows.t() @ inputs.flatten(0, -2) if wanted[0] else None,
                rows.sum(0) if wanted[1] else None,
            ]
        return None, *(None if one is None else one.to(weight.dtype) for one in found)


class _Inputs(torch.autograd.Function):
    """A layer; in backward it computes the gradient of its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, box: Box, token: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, options: Options
    ) -> Tensor:
        ctx.box, ctx.options, ctx.token = box, options, token.dtype
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, weight, bias) if options is None else F.conv2d(inputs, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = gradients
        ctx.box[:] = [(inputs, gradient, ctx.options)]
        if ctx.options is None:
            found: Tensor | None = gradient @ weight.to(gradient.dtype)
        else:
            found, _, _ = convolution_backward(gradient, inputs, weight, (True, False, False), *ctx.options)
        return None, gradient.new_zeros((), dtype=ctx.token), found, None, None, None


def _in_full(stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> tuple[Any, ...]:
    given = [[value] if isinstance(value, int) else list(value) for value in (stride, padding, dilation)]
    return *(values * (2 // len(values)) for values in given), groups
