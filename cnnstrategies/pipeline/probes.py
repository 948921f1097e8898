"""Outputs that are made up to learn how much samples count in a loss, and what their gradients tell."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Rows = Mapping[torch.device, Tensor]  # The same ones on each device.
Gradients = Mapping[int, Tensor]  # Of a loss, or what they tell, for each leaf of the outputs that has any.
# In units of the type's resolution: how far the gradients of rows may differ between two ways to sum them up.
ROUNDING = 64


class Probes(NamedTuple):
    """Some samples with made-up outputs, and the gradients that the loss of the whole batch has there.

    Attributes:
        rows: Those of the batch that they are.
        strong: The first of them, among which each output has about its greatest gradient.
    """

    rows: Rows
    outputs: Any
    gradients: Gradients
    strong: int

    def of(self, microbatch: int) -> "Probes":
        """The strong ones, and another one for each microbatch: it shows where samples are compared."""
        place = self.strong + microbatch

        def some(leaf: Any) -> Any:
            return joined(leaf[: self.strong], leaf[place : place + 1]) if isinstance(leaf, Tensor) else leaf

        rows = {device: some(one) for device, one in self.rows.items()}
        gradients = {leaf: some(one) for leaf, one in self.gradients.items()}
        return Probes(rows, tree_map(some, self.outputs), gradients, self.strong)


def differentiable(leaf: Any) -> bool:
    """Whether it is a tensor that may have a gradient."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def device_of(outputs: Any) -> torch.device:
    """Where the loss is computed."""
    device: torch.device = next(leaf.device for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return device


def varied(leaf: Any, as_they_are: Tensor, phase: float) -> Any:
    """An output whose numbers are multiplied, each with another one between 0.5 and 1, but for some rows."""
    if not differentiable(leaf):
        return leaf
    numbers = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32).reshape(leaf.shape)
    shares = (0.75 + 0.25 * torch.sin(numbers * 2.3 + phase)).to(leaf.dtype)
    shares[as_they_are] = 1.0
    return leaf * shares


def copied(leaf: Any) -> Any:
    """An output for a loss, which may change it in place."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def joined(leaf: Any, other: Any) -> Any:
    """The rows of two outputs."""
    return torch.cat([leaf, other]) if isinstance(leaf, Tensor) else leaf


def rows_of(leaf: Any, rows: Tensor | slice = slice(None)) -> Any:
    """Some rows of an output, apart from its graph."""
    if not isinstance(leaf, Tensor):
        return leaf
    taken = leaf.detach()[rows]
    # The factors do not depend on the precision.
    lower = torch.is_autocast_enabled(leaf.device.type) and differentiable(leaf) and leaf.dtype.itemsize < 4
    return taken.float() if lower else taken


def at_rows(gradients: Gradients, rows: Rows) -> Gradients:
    """Those of some samples."""
    return {leaf: one[rows[one.device]] for leaf, one in gradients.items()}


def strong_ones(strengths: Sequence[Sequence[float]], rows: Sequence[int]) -> list[int]:
    """A few of some samples, among which each output has about its greatest gradient."""
    chosen: list[int] = []
    for of_samples in strengths:
        greatest = max(rows, key=of_samples.__getitem__)
        if all(of_samples[row] < of_samples[greatest] / 8 for row in chosen):
            chosen.append(greatest)
    return chosen


def compare(whole: Gradients, part: Gradients) -> Gradients:
    """For each output by what to multiply the gradients of a part to have those of the whole, and what remains (2,).

    That is above zero where no factor does it, which then is 0; where both are zero, it is 1. All stays on its device.
    """
    compared = {}
    for leaf in sorted(whole.keys() | part.keys()):
        like = whole[leaf] if leaf in whole else part[leaf]
        one, other = (
            (gradients[leaf] if leaf in gradients else torch.zeros_like(like)).to(wide(like)).flatten()
            for gradients in (whole, part)
        )
        squares, largest, is_finite = other @ other, one.abs().max(), torch.isfinite(other).all()
        factor = torch.where(squares > 0, (one @ other) / squares, (largest == 0).to(one.dtype))
        rest = (one - factor * other).abs().max() - ROUNDING * torch.finfo(like.dtype).eps * largest
        rest = torch.where(is_finite, rest, 0.0)
        factor = torch.where(is_finite, factor, (largest != 0).to(one.dtype)).masked_fill_(rest > 0, 0)
        compared[leaf] = torch.stack([factor, rest])
    return compared


def wide(tensor: Tensor) -> torch.dtype:
    """The type in which gradients of a device are compared."""
    return torch.float64 if tensor.device.type != "mps" else torch.float32
