"""BatchNorm's running statistics for a whole batch, from the means and variances of its microbatches.

Each replica of a stage merges those of its own microbatches, and sends the other replicas one mean and one variance for
each channel.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import add_all, copy_all, put_buffer

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# Number of different numbers of values whose weights are remembered, such as that of a smaller last batch.
_KNOWN_COUNTS = 16
ENTRY_BYTES = 8  # Bytes of a mean, or of a variance, that replicas send each other: a number in float64.


class StatisticsRecorder:
    """A recorder of the means and variances that one BatchNorm layer computes during a step.

    With momentum 1, the layer's own kernel overwrites the running statistics with the mean and variance of the current
    call. During a step, the recorder therefore sets the momentum to 1, and replaces the running statistics by other
    tensors, so that the running statistics are not lost. All microbatches use the same replacement tensors, because a
    compiled stage would be compiled again for different tensors.

    Attributes:
        name: Name of the layer.
        layer: The layer.
        calls: Number of times that a forward of the stage calls the layer. The number is equal on all replicas, even if
            a replica has no microbatch in a step.
        places: For each call of the layer in a forward, two tensors (C,) that are reserved for this call. The kernel
            writes the mean and the variance into them.
        counts: For each call of the layer so far in the current forward, the number of values per channel.
        has_more_calls: Whether a forward has called the layer more often than `calls` says, because a module that runs
            as a whole calls the layer several times.
    """

    def __init__(self, name: str, layer: Any, calls: int) -> None:
        self.name, self.layer, self.calls = name, layer, calls
        self.places: list[tuple[Tensor, Tensor]] = []
        self.counts: list[int] = []
        self.has_more_calls = False
        self._saved: tuple[Any, ...] | None = None
        layer.register_forward_pre_hook(self._before)

    @property
    def is_active(self) -> bool:
        """Whether the layer writes into the reserved tensors, from :meth:`begin` until :meth:`restore`."""
        return self._saved is not None

    def begin(self) -> None:
        """Save the layer's running statistics, and put the tensors of the first call (`places[0]`) in their place.

        When a forward calls the layer for the first time, the layer's kernel then writes the mean and variance of this
        call into these tensors.
        """
        # Without the checks of `nn.Module.__setattr__`, which take longer than all else here.
        layer, buffers = self.layer, vars(self.layer)["_buffers"]
        self._saved = (*(buffers[name] for name in _BUFFERS), layer.momentum)
        buffers["num_batches_tracked"] = None
        object.__setattr__(layer, "momentum", 1.0)
        self._put(0)

    def restore(self) -> None:
        """Restore the running statistics that the layer had before :meth:`begin`."""
        if self._saved is not None:
            *buffers, momentum = self._saved
            vars(self.layer)["_buffers"].update(zip(_BUFFERS, buffers, strict=True))
            object.__setattr__(self.layer, "momentum", momentum)
            self._saved = None

    def _before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._saved is None:
            return
        call = len(self.counts)
        if call == self.calls:
            self.has_more_calls = True  # What the layer records now is not used.
            return
        self.counts.append(inputs[0].numel() // self.layer.num_features)
        if self.calls > 1:
            self._put(call)

    def _put(self, call: int) -> None:
        """Let the layer write the mean and variance of a call into the tensors that are reserved for this call.

        The tensors `places[call]` become the layer's running statistics, which the layer's kernel overwrites.

        Args:
            call: Number of calls of the layer that precede this call in the same forward of the stage.
        """
        for name, place in zip(("running_mean", "running_var"), self.places[call], strict=True):
            put_buffer(self.layer, name, place)


class StatisticsTable:
    """A table of the means and unbiased variances that BatchNorm layers have computed on one replica in a step.

    At the end of the step, :meth:`send` merges the rows of the table into one row, which the other replicas get, and
    :meth:`update` computes the layers' running statistics from the rows of all replicas. The table has a row for each
    microbatch of this replica, with an entry for each call of a layer. The channels of all layers are concatenated, so
    that a single computation on the device updates all layers, and the CPU does not have to read values from the
    device. For each entry, the table also holds the number of values per channel, which is 0 if the call was not made.

    Args:
        records: Recorders of the layers in training mode.
    """

    def __init__(self, records: Sequence[StatisticsRecorder]) -> None:
        self._records = records
        self._layers = [record.layer for record in records]
        self._calls = max(record.calls for record in records)
        self._widths = [int(layer.num_features) for layer in self._layers]
        like = self._layers[0].running_mean
        self._layer_of = torch.repeat_interleave(torch.arange(len(records)), torch.tensor(self._widths)).to(like.device)
        # Means and variances of the current microbatch (calls, 2, channels). The layers write into views of this
        # tensor.
        self._current = like.new_zeros(self._calls, 2, sum(self._widths))
        self._rows: list[Tensor] = []  # Tensors for the microbatches, which all steps use.
        # By the numbers of values: their sums, and how the means and variances are combined.
        self._weights: dict[tuple[Any, ...], tuple[Tensor, UnionWeights]] = {}
        stop = 0
        for record, width in zip(records, self._widths, strict=True):
            columns = slice(stop, stop := stop + width)
            record.places = [
                (self._current[call, 0, columns], self._current[call, 1, columns]) for call in range(record.calls)
            ]
        self.clear()

    def clear(self) -> None:
        """Remove all rows of the table, before a new step."""
        # For each microbatch, call and layer, the number of values per channel.
        self._counts: list[tuple[tuple[int, ...], ...]] = []
        self._merged: Tensor | None = None
        self._all_merged: Tensor | None = None
        self._work: dist.Work | None = None

    def record(self) -> None:
        """Copy a microbatch's means, variances and numbers of values into the table.

        Call this directly after the microbatch's forward, because the next forward overwrites these values.
        """
        if len(self._rows) == len(self._counts):
            self._rows.append(torch.empty_like(self._current))
        self._rows[len(self._counts)].copy_(self._current)
        self._counts.append(
            tuple(
                tuple(record.counts[call] if call < len(record.counts) else 0 for record in self._records)
                for call in range(self._calls)
            )
        )

    def send(self, group: dist.ProcessGroup | None) -> None:
        """Merge this replica's rows, and begin to send the result to the other replicas. Do nothing the second time.

        Args:
            group: Group of the stage's replicas, which must all call this; None if the stage has one replica.
        """
        if self._merged is not None:
            return
        self._merged = self._all_merged = self._merge()
        if group is not None:
            self._all_merged = self._merged.new_empty(group.size() * len(self._merged))
            self._work = dist.all_gather_into_tensor(self._all_merged, self._merged, group=group, async_op=True)

    def _merge(self) -> Tensor:
        """Return the numbers of values, means and variances of all rows together, as one flat tensor."""
        if not self._counts:
            entries = self._calls * (len(self._layers) + 2 * sum(self._widths))
            return torch.zeros(entries, dtype=torch.float64, device=self._current.device)
        recorded = torch.stack(self._rows[: len(self._counts)]).double()
        key = tuple(self._counts)
        if key not in self._weights:
            # Shape: (microbatches, calls, layers).
            counts = numbers_on(key, self._current.device)
            if len(self._weights) > _KNOWN_COUNTS:
                self._weights.clear()
            self._weights[key] = counts.sum(0).flatten(), UnionWeights.of(counts[..., self._layer_of])
        total, weights = self._weights[key]
        return torch.cat([total, weights.union(recorded).flatten()])

    def update(self) -> None:
        """Update the layers' running statistics with the means and variances of the whole batch, after :meth:`send`.

        If a forward calls a layer several times, there is an update for each call, in the order of the calls.
        """
        assert self._merged is not None
        assert self._all_merged is not None
        if self._work is not None:
            self._work.wait()
        rows, entries = self._all_merged.view(-1, len(self._merged)), self._calls * len(self._layers)
        counts = rows[:, :entries].reshape(len(rows), self._calls, len(self._layers))
        merged = rows[:, entries:].reshape(len(rows), *self._current.shape)
        buffers = [*(layer.running_mean for layer in self._layers), *(layer.running_var for layer in self._layers)]
        running = torch.cat(buffers).view(2, -1).double()
        updates = torch.zeros_like(counts[0, 0], dtype=torch.int64)
        # One replica has merged all there is.
        whole = merged[0] if len(rows) == 1 else UnionWeights.of(counts[..., self._layer_of]).union(merged)
        for batch, reached in zip(whole, counts.sum(0) > 0, strict=True):
            updates = updates + reached
            weight = self._weight(updates) * reached
            running = running.lerp(batch, weight[self._layer_of].expand_as(batch))
        copy_all(buffers, [part for row in running.to(buffers[0].dtype) for part in row.split(self._widths)])
        add_all([layer.num_batches_tracked for layer in self._layers], updates.unbind())
        self.clear()

    def _weight(self, updates: Tensor) -> Tensor:
        """Return, for each layer, the factor by which the batch's mean and variance enter the running statistics.

        Args:
            updates: For each layer, the number of updates in this step, including the current update.
        """
        momenta = [layer.momentum for layer in self._layers]
        weight = numbers_on(tuple(momentum or 0.0 for momentum in momenta), updates.device)
        if None not in momenta:
            return weight
        # If a layer's momentum is None, its running statistics are the average over all updates. The weight of an
        # update is then 1 divided by the number of updates so far.
        averages = numbers_on(tuple(momentum is None for momentum in momenta), updates.device) > 0
        tracked = torch.stack([layer.num_batches_tracked for layer in self._layers])
        return torch.where(averages, 1.0 / (tracked + updates).clamp(min=1).double(), weight)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def numbers_on(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Return nested tuples of numbers as a tensor on a device.

    Results are cached, because the process waits for each copy from CPU memory to the device.
    """
    return torch.tensor(numbers, dtype=torch.float64, device=device)


class UnionWeights(NamedTuple):
    """How the means and variances of M microbatches, or of M replicas, are combined, for K calls and W channels.

    Attributes:
        of_means: Weight of each mean (M, K, W) in the mean of all values.
        of_variances: Weight of each unbiased variance in the variance of all values.
        of_squares: Weight of each squared difference between a mean and the mean of all values in the variance.
    """

    of_means: Tensor
    of_variances: Tensor
    of_squares: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> "UnionWeights":
        """Return the weights.

        Args:
            counts: Number of values in each microbatch (M, K, W).
        """
        total = counts.sum(0)
        others = (total - 1).clamp(min=1)
        return cls(counts / total.clamp(min=1), (counts - 1).clamp(min=0) / others, counts / others)

    def union(self, statistics: Tensor) -> Tensor:
        """Return the mean and the unbiased variance of all values (K, 2, W).

        Args:
            statistics: Mean and unbiased variance of each microbatch (M, K, 2, W).
        """
        means, unbiased = statistics.unbind(2)
        mean = (self.of_means * means).sum(0)
        variance = (self.of_variances * unbiased + self.of_squares * (means - mean) ** 2).sum(0)
        return torch.stack([mean, variance], dim=1)
