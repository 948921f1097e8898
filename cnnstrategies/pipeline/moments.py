"""Moments of all BatchNorm calls of a stage in one table, and what they make of the running statistics.

Everything is computed for all layers at once, on the device and without looking at a value.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cnnstrategies._torch_private import add_all, copy_all


class MomentTable:
    """Means and unbiased variances of each call of each layer in each microbatch of a step.

    A *slot* is one call of one layer in a forward: the first calls of all layers come before the second ones of those
    that are called again, and so on. A slot has a column for each of its layer's channels.

    Args:
        layers: The layers, each with the number of its calls in a forward.

    Attributes:
        slots: Call and layer of each slot.
        counts: For each microbatch and slot the values per channel; 0 where the layer was not reached.
    """

    def __init__(self, layers: Sequence[tuple[Any, int]], microbatches: int) -> None:
        self.layers = [layer for layer, _ in layers]
        self.microbatches = microbatches
        self.calls = max((calls for _, calls in layers), default=0)
        self.slots = [
            (call, index) for call in range(self.calls) for index, (_, calls) in enumerate(layers) if call < calls
        ]
        like = self.layers[0].running_mean if layers else torch.empty(0)
        widths = [int(layer.num_features) for layer in self.layers]
        self.starts = [0]
        for _, index in self.slots:
            self.starts.append(self.starts[-1] + widths[index])
        self.moments = torch.zeros(microbatches, 2, self.starts[-1], dtype=like.dtype, device=like.device)
        self._present = torch.zeros(2, self.starts[-1], dtype=like.dtype, device=like.device)
        self.counts = [[0] * len(self.slots) for _ in range(microbatches)]
        # The slot of each column; of a call after the first, the column of the same channel's first call.
        self._slot_of = torch.repeat_interleave(
            torch.arange(len(self.slots)), torch.tensor([widths[index] for _, index in self.slots], dtype=torch.int64)
        ).to(like.device)
        self._layer_of = self._slot_of[: sum(widths)]
        self._cell_of = torch.tensor([call * len(widths) + index for call, index in self.slots], device=like.device)
        self._first_call_of = [
            torch.cat([torch.arange(self.starts[i], self.starts[i + 1]) for c, i in self.slots if c == call]).to(
                like.device
            )
            for call in range(1, self.calls)
        ]
        self._new = torch.empty(2, sum(widths), dtype=like.dtype, device=like.device)
        self._parts = [part for moment in self._new for part in moment.split(widths)]
        self._momenta: list[float | None] = []
        self._weight = torch.empty(0)
        self._updates = torch.zeros(len(widths), dtype=torch.int64, device=like.device)
        self._updates_of = self._updates.unbind()

    def clear(self) -> None:
        """Start from none."""
        self.moments.zero_()
        for row in self.counts:
            row[:] = [0] * len(row)

    def places(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Where a layer puts the mean and the variance (C,) of each of its calls, whatever the microbatch."""
        slots = [slot for slot, (_, index) in enumerate(self.slots) if index == layer]
        parts = [self._present[:, self.starts[slot] : self.starts[slot + 1]] for slot in slots]
        return [(part[0], part[1]) for part in parts]

    def note(self, microbatch: int, counts: Sequence[Sequence[int]]) -> None:
        """Keep what the layers have put there in a microbatch, with the values per channel of each layer's calls."""
        self.moments[microbatch].copy_(self._present)
        self.counts[microbatch] = [
            counts[index][call] if call < len(counts[index]) else 0 for call, index in self.slots
        ]

    def update(self, deferred: bool, group: dist.ProcessGroup | None) -> None:
        """Update the layers' running statistics: ``deferred`` by the union of all microbatches, else by each in turn.

        The microbatches of the stage's replicas, a group unless there is one, count too.
        """
        moments = self.moments.double()
        counts = counts_on(tuple(map(tuple, self.counts)), moments.device)
        if group is not None:
            joined = torch.cat([counts.flatten(), moments.flatten()])
            dist.all_reduce(joined, group=group)
            counts = joined[: counts.numel()].view_as(counts)
            moments = joined[counts.numel() :].view_as(moments)
        if deferred:
            moments = _union(counts[:, self._slot_of], moments)
            counts = counts.sum(0, keepdim=True)
        kept, shares, updates = self._weights(counts > 0)
        added = (shares[:, None, self._slot_of] * moments).sum(0)
        total = added[:, : self._new.shape[1]]
        for call, columns in enumerate(self._first_call_of, start=1):
            start = self.starts[next(slot for slot, (c, _) in enumerate(self.slots) if c == call)]
            total[:, columns] += added[:, start : start + len(columns)]
        buffers = [*(layer.running_mean for layer in self.layers), *(layer.running_var for layer in self.layers)]
        running = torch.cat(buffers).view(2, -1)
        self._new.copy_(total.addcmul_(running, kept[self._layer_of]))
        copy_all(buffers, self._parts)
        self._updates.copy_(updates)
        add_all([layer.num_batches_tracked for layer in self.layers], self._updates_of)

    def _weights(self, reached: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each update counts, from which slots were called in each row.

        Returns:
            For each layer what is left of the old value, for each row and slot what it adds, and for each layer the
            number of updates.
        """
        rows, layers = len(reached), len(self.layers)
        cells = torch.zeros(rows, self.calls * layers, dtype=torch.bool, device=reached.device)
        cells[:, self._cell_of] = reached
        in_turn = cells.view(rows * self.calls, layers)
        number = in_turn.cumsum(0)
        momenta = [layer.momentum for layer in self.layers]
        if momenta != self._momenta:
            self._momenta = momenta
            self._weight = torch.tensor([one or 0.0 for one in momenta], dtype=torch.float64, device=reached.device)
        weight = self._weight
        if None in momenta:  # An average of all updates so far.
            averages = torch.tensor([momentum is None for momentum in momenta]).to(reached.device)
            tracked = torch.stack([layer.num_batches_tracked for layer in self.layers])
            weight = torch.where(averages, 1.0 / (tracked + number).clamp(min=1).double(), weight)
        weight = weight * in_turn
        left = torch.cumprod((1.0 - weight).flip(0), 0)
        later = torch.cat([torch.ones_like(left[:1]), left[:-1]]).flip(0)  # What is left after the later ones.
        shares = (weight * later).view(rows, -1)[:, self._cell_of]
        return left[-1], shares, number[-1]


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def counts_on(counts: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """The same numbers as a tensor; kept, because the host would wait for each copy to a device."""
    return torch.tensor(counts, dtype=torch.float64, device=device)


def _union(counts: Tensor, moments: Tensor) -> Tensor:
    """Mean and unbiased variance (1, 2, W) of the union of rows with counts (M, W) and such moments (M, 2, W)."""
    means, unbiased = moments.unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    squares = (unbiased * (counts - 1).clamp(min=0) + counts * (means - mean) ** 2).sum(0)
    return torch.stack([mean, squares / (total - 1).clamp(min=1)])[None]
