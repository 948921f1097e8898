"""Compare the gradients for a batch with those for parts of the batch, or for other batches, up to rounding."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cnnstrategies.pipeline.combining import is_near

# A gradient is a sum over many values, so rounding changes it more than a result of the forward.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION = 0.1
# Largest difference between a gradient and the same gradient in a batch of another size, relative to the gradient, if
# rounding changes the signs of single values. A hook that divides a gradient by the size of the batch changes it more.
_ALIKE = 0.25
# Number of elements of a gradient that are added to one element of a sketch. Smaller gradients are kept as they are.
_ADDED, _SMALL = 64, 4096
CHUNK = 2**20  # Number of elements that are converted at once; a multiple of the number above.


class Sketch(NamedTuple):
    """The compared values of a gradient: sums over groups of its elements, each multiplied by a fixed weight.

    The sketch of a sum of gradients is the sum of their sketches. Two gradients that differ have different sketches,
    except by a coincidence that would need these weights.

    Attributes:
        values: The sums; all elements of a small gradient.
        largest: Largest magnitude of an element (1,).
        dtype: Type of the gradient.
    """

    values: Tensor
    largest: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, gradient: Tensor) -> "Sketch":
        """Return the sketch of a gradient."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        flat = gradient.detach().reshape(-1)
        largest = _largest(flat).to(wide)
        if len(flat) <= _SMALL:
            return cls(flat.to(wide, copy=True), largest, gradient.dtype)
        weights = torch.randn(_ADDED, generator=torch.Generator().manual_seed(0)).to(flat.device, wide)
        end = len(flat) // _ADDED * _ADDED
        chunks = [(chunk.to(wide).view(-1, _ADDED) * weights).sum(1) for chunk in torch.split(flat[:end], CHUNK)]
        return cls(torch.cat([*chunks, flat[end:].to(wide)]), largest, gradient.dtype)

    @classmethod
    def whole(cls, gradient: Tensor) -> "Sketch":
        """Return all elements of a gradient."""
        return cls(gradient, _largest(gradient), gradient.dtype)

    @property
    def limit(self) -> float:
        """Largest difference that rounding may cause, relative to the largest element."""
        is_low = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return _LOW_PRECISION if is_low else _LIMITS.get(self.dtype, _LOW_PRECISION)


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude of an element (1,)."""
    return (torch.linalg.vector_norm(gradient, torch.inf) if gradient.numel() else gradient.sum()).reshape(1)


class ComparedGradients:
    """The gradients of several tensors for a batch.

    Some gradients are zero but for rounding: the result of a softmax or of an instance normalisation does not depend on
    a bias in front of it. Differences are therefore compared with the largest of all gradients as well.

    Args:
        gradients: The gradients; None for tensors without a gradient.
    """

    def __init__(self, gradients: Sequence[Sketch | None]) -> None:
        self._gradients = gradients
        self._largest = max((float(gradient.largest) for gradient in gradients if gradient is not None), default=0.0)

    @property
    def have_low_precision(self) -> bool:
        """Whether a gradient has few digits. Rounding of a sum's terms may then be as large as the sum."""
        return any(gradient is not None and gradient.limit == _LOW_PRECISION for gradient in self._gradients)

    def are_near(self, *parts: Sequence[Tensor | None]) -> bool:
        """Whether all elements are the same, up to rounding.

        Args:
            parts: For each part of the batch the gradients. A gradient for the batch has the rows of those for the
                parts, or is their sum.
        """
        return self._agree(parts) and all(self._is_near(*pair) for pair in self._pairs(parts))

    def are_alike(self, *parts: Sequence[Tensor | None]) -> bool:
        """Whether most elements are the same, up to rounding. The arguments are those of :meth:`are_near`."""
        return self._agree(parts) and all(self._is_alike(*pair) for pair in self._pairs(parts))

    def _agree(self, parts: Sequence[Sequence[Tensor | None]]) -> bool:
        """Whether the same tensors have gradients."""
        columns = zip(self._gradients, *parts, strict=True)
        return all((whole is None) == all(part is None for part in column) for whole, *column in columns)

    def _pairs(self, parts: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[Sketch, Tensor]]:
        """Yield each gradient for the batch, and its values from the gradients for the parts."""
        for whole, *column in zip(self._gradients, *parts, strict=True):
            present = [gradient for gradient in column if gradient is not None]
            if whole is None:
                continue
            if present[0].shape == whole.values.shape:
                yield whole, torch.stack([*present]).sum(0)
            elif sum(map(len, present)) == len(whole.values):
                yield whole, torch.cat([*present])

    def _is_near(self, whole: Sketch, actual: Tensor) -> bool:
        # `is_near` compares with the largest element.
        scale = actual.new_full((1,), max(float(whole.largest), whole.limit * self._largest))
        first, second = (torch.cat([values.reshape(-1), scale]) for values in (actual, whole.values))
        return is_near(first, second, whole.limit)

    def _is_alike(self, whole: Sketch, actual: Tensor) -> bool:
        count = max(1, actual.numel())
        pair = (actual - whole.values, whole.values)
        difference, size = (float(torch.linalg.vector_norm(values.double())) / math.sqrt(count) for values in pair)
        return difference <= _ALIKE * max(size, whole.limit * self._largest)
