"""Random numbers: every rank's generator advances as the generator of the rank that uses the numbers."""

from typing import Any

import torch
from torch import Tensor

from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.operations import tensors_in, with_tensors


def draw_and_drop(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the random numbers that other ranks draw in an operation. Operands without values are replaced by 0.5.

    A probability, a mean and a standard deviation may all be 0.5.
    """

    def with_storage(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ForeignTensor):
            return torch.full(tensor.shape, 0.5, device=tensor.device).to(tensor.dtype)
        return tensor.clone()

    args, kwargs = with_tensors(with_storage, args, kwargs)
    func(*args, **kwargs)


def generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """Return the generator from which an operation draws."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = next(tensors_in(args, kwargs)).device
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
