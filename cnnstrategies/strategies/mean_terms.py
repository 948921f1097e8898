"""Means in a training loss whose divisors are not the number of samples, such as ``cross_entropy`` with a class weight.

The autograd graph of a loss shows these means, and also their divisors, however the user's code has called the loss
function. A loss may be a sum of several means, and each mean has its own divisor.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies._torch_private import LINEAR, divisor

LONGEST = 1000  # Largest number of autograd nodes that are looked at, for a loss with a large graph of sums.


class MeanTerm(NamedTuple):
    """A mean that is a part of a loss.

    Attributes:
        node: Autograd node of the mean.
        divisor: Number by which the mean divides a sum, such as the sum of the weights of the valid targets.
    """

    node: Any
    divisor: Tensor | int

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients that the mean passes on by a factor. The value of the loss does not change."""

        def scaled(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            return tuple(None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients)

        self.node.register_prehook(scaled)


def mean_terms(loss: Tensor) -> list[MeanTerm]:
    """Return the means of which a loss is a linear function, in an order that depends only on the loss's computation.

    Only means with a divisor that depends on the samples are returned; see
    :func:`cnnstrategies._torch_private.divisor`. The rest of the loss may be anything.
    """
    terms: list[MeanTerm] = []
    waiting, seen = [loss.grad_fn], {None}
    while waiting and len(seen) < LONGEST:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        number = divisor(node)
        following = [other for other, _ in node.next_functions if other is not None]
        if number is not None:
            terms.append(MeanTerm(node, number))
        elif _is_linear(node):
            waiting += reversed(following)
    return terms


def _is_linear(node: Any) -> bool:
    """Return whether an autograd node's function is a linear function of all tensors that require a gradient."""
    name, arguments = node.name(), [other is not None for other, _ in node.next_functions]
    if name.startswith("Mul"):
        return name in LINEAR and sum(arguments) == 1
    if name.startswith("Div"):
        return name in LINEAR and not any(arguments[1:])
    return name in LINEAR


def joined(numbers: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Return numbers as one tensor on the device of the tensor `like`, in dtype float64 if the device supports it."""
    dtype = torch.float64 if like.device.type != "mps" else torch.float32
    tensors = [torch.as_tensor(number, dtype=dtype, device=like.device).reshape(1) for number in numbers]
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype, device=like.device)
