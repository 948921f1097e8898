"""Buffers that a stage's forwards change: BatchNorm's running statistics, and other buffers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import add_all, copy_all, put_buffer, writes
from cnnstrategies.errors import ConfigurationError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network, in the present modes of its layers, normalises over the samples of a microbatch."""
    layers = (layer for layer in network.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.training or not layer.track_running_stats for layer in layers)


class StageBuffers:
    """Keeps the buffers of a stage equal on all of its replicas.

    BatchNorm layers normalise each microbatch by itself, as in GPipe. While a step runs, the moments of each microbatch
    are recorded. At the end of the step the replicas combine the moments, and each replica makes one update by the mean
    and the unbiased variance of the whole batch, as one full-batch pass does (torchgpipe calls this deferred batch
    normalization). So momentum keeps its meaning, whatever the number of microbatches.

    For other buffers, such as the vectors of a spectral norm, all replicas take over the buffers of the first replica
    after each step, as under DDP. The first step shows which buffers change; constant buffers are not sent.

    Args:
        module: The stage.
        group: Group of the stage's replicas; None for one replica.
        calls: Number of calls of each module in a forward of the stage, by name.

    Raises:
        ConfigurationError: The stage contains a SyncBatchNorm layer.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        calls: Mapping[str, int],
    ) -> None:
        self.group = group
        self._module = module
        self._records: list[MomentRecorder] = []
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a SyncBatchNorm, with which replicas would wait for each other while they run "
                    "different microbatches: use BatchNorm2d (trainer.sync_batchnorm: false)"
                )
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                count = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                if count:  # A layer without calls is used in evaluation only.
                    self._records.append(MomentRecorder(name, layer, count))
        self._training: list[MomentRecorder] = []
        self._moments: MomentTable | None = None
        recorded = {id(buffer) for record in self._records for buffer in record.layer.buffers(recurse=False)}
        self._others = [name for name, buffer in module.named_buffers() if id(buffer) not in recorded]
        self._changing: list[str] | None = None
        self._before: list[tuple[int, int]] = []

    def begin(self, microbatches: int) -> None:
        """Record changes of buffers and moments of layers in training mode, until :meth:`finish` or :meth:`abandon`."""
        training = [record for record in self._records if record.layer.training]
        if not training:
            self._moments = None
        elif self._moments is None or self._training != training or self._moments.microbatches != microbatches:
            self._moments = MomentTable(training, microbatches)
        self._training = training
        if self._moments is not None:
            self._moments.clear()
        for record in training:
            record.begin()
        if self.group is not None:
            self._before = self._states()

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Record the moments of a microbatch's forward, which runs inside the context.

        Args:
            microbatch: The microbatch.
            again: Whether the forward recomputes activations; its moments are then not recorded a second time.
        """
        for record in self._training:
            record.counts.clear()
        yield
        if self._moments is not None and not again:
            self._moments.record(microbatch)

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics by the step's moments, and share other buffers; a collective of replicas."""
        self.abandon()
        if self._moments is not None:
            self._moments.update(self.group)
        if self.group is not None and self._others:
            self._share_others()

    def abandon(self) -> None:
        """Restore the layers' running statistics as they were before the step."""
        for record in self._records:
            record.restore()

    def _share_others(self) -> None:
        changed = [state != before for state, before in zip(self._states(), self._before, strict=True)]
        if self._changing is None:
            device = self._module.get_buffer(self._others[0]).device
            flags = torch.tensor(changed, dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            self._changing = [name for name, flag in zip(self._others, flags.tolist(), strict=True) if flag]
        late = {name for name, is_changed in zip(self._others, changed, strict=True) if is_changed} - set(
            self._changing
        )
        if late:
            raise ConfigurationError(
                f"the buffer {min(late)} has changed, but did not change in the first step: it would differ between "
                "the replicas of a stage; change it in every step, or give the stage one replica"
            )
        for name in self._changing:
            values = self._module.get_buffer(name).contiguous()
            dist.broadcast(values, group=self.group, group_src=0)
            self._module.get_buffer(name).copy_(values)

    def _states(self) -> list[tuple[int, int]]:
        """Return the identity of each other buffer, and the number of writes to it, which autograd counts."""
        return [(id(buffer), writes(buffer)) for buffer in map(self._module.get_buffer, self._others)]


class MomentRecorder:
    """Records the moments of one layer during a step; the layer's own kernel computes them.

    With momentum 1 the kernel writes the moments of a call to the tensors that the layer holds as running statistics.
    These tensors are the same for all microbatches, because a compiled stage would be compiled again for other tensors.

    Attributes:
        name: Name of the layer.
        layer: The layer.
        calls: Number of calls of the layer in a forward. The number is equal on all replicas, also on a replica without
            a microbatch in this step.
        places: For each call the tensors (C,) to which mean and variance are written.
        counts: For each call so far the number of values per channel.
    """

    def __init__(self, name: str, layer: Any, calls: int) -> None:
        self.name, self.layer, self.calls = name, layer, calls
        self.places: list[tuple[Tensor, Tensor]] = []
        self.counts: list[int] = []
        self._saved: tuple[Any, ...] | None = None
        layer.register_forward_pre_hook(self._before)

    def begin(self) -> None:
        """Set the layer's running statistics aside, and begin to record moments."""
        layer = self.layer
        self._saved = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.num_batches_tracked, layer.momentum = None, 1.0
        self._put(0)

    def restore(self) -> None:
        """Restore the layer's running statistics."""
        if self._saved is not None:
            layer = self.layer
            layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = self._saved
            self._saved = None

    def _before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._saved is None:
            return
        call = len(self.counts)
        if call == self.calls:
            raise ConfigurationError(
                f"{self.name} normalises several times in one call of the layer that contains it: call it from a "
                "module that is not a subclass of a torch.nn layer, or call it once"
            )
        self.counts.append(inputs[0].numel() // self.layer.num_features)
        if self.calls > 1:
            self._put(call)

    def _put(self, call: int) -> None:
        for name, place in zip(("running_mean", "running_var"), self.places[call], strict=True):
            put_buffer(self.layer, name, place)


class MomentTable:
    """Means and unbiased variances of each call of each layer in each microbatch, and the update of the statistics.

    All layers are concatenated, with a column for each channel, so that all layers are computed at once, on the device
    and without reading a value on the host. For each microbatch, call and layer the table counts the values per
    channel; the count is 0 for a call that did not happen.

    Args:
        records: Recorders of the layers in training mode.
        microbatches: Number of microbatches of a step.
    """

    def __init__(self, records: Sequence[MomentRecorder], microbatches: int) -> None:
        self.microbatches = microbatches
        self._records = records
        self._layers = [record.layer for record in records]
        self._calls = max(record.calls for record in records)
        self._widths = [int(layer.num_features) for layer in self._layers]
        like = self._layers[0].running_mean
        self._layer_of = torch.repeat_interleave(torch.arange(len(records)), torch.tensor(self._widths)).to(like.device)
        self._present = like.new_zeros(self._calls, 2, sum(self._widths))
        self._moments = like.new_zeros(microbatches, *self._present.shape)
        stop = 0
        for record, width in zip(records, self._widths, strict=True):
            columns = slice(stop, stop := stop + width)
            record.places = [
                (self._present[call, 0, columns], self._present[call, 1, columns]) for call in range(record.calls)
            ]
        self.clear()

    def clear(self) -> None:
        """Remove all moments."""
        self._moments.zero_()
        self._counts: list[tuple[tuple[int, ...], ...]] = [
            ((0,) * len(self._layers),) * self._calls for _ in range(self.microbatches)
        ]

    def record(self, microbatch: int) -> None:
        """Store the moments that the layers have written in a microbatch."""
        self._moments[microbatch].copy_(self._present)
        self._counts[microbatch] = tuple(
            tuple(record.counts[call] if call < len(record.counts) else 0 for record in self._records)
            for call in range(self._calls)
        )

    def update(self, group: dist.ProcessGroup | None) -> None:
        """Update the running statistics by the union of all microbatches, call after call of each layer."""
        moments = self._moments.double()  # (microbatches, calls, 2, channels)
        counts = numbers_on(tuple(self._counts), moments.device)  # (microbatches, calls, layers)
        if group is not None:
            joined = torch.cat([counts.flatten(), moments.flatten()])
            dist.all_reduce(joined, group=group)
            counts = joined[: counts.numel()].view_as(counts)
            moments = joined[counts.numel() :].view_as(moments)
        buffers = [*(layer.running_mean for layer in self._layers), *(layer.running_var for layer in self._layers)]
        statistics = torch.cat(buffers).view(2, -1).double()
        updates = torch.zeros_like(counts[0, 0], dtype=torch.int64)
        for moment, reached in zip(_union(counts[..., self._layer_of], moments), counts.sum(0) > 0, strict=True):
            updates = updates + reached
            weight = self._weight(updates) * reached
            statistics = statistics.lerp(moment, weight[self._layer_of].expand_as(moment))
        copy_all(buffers, [part for row in statistics.to(buffers[0].dtype) for part in row.split(self._widths)])
        add_all([layer.num_batches_tracked for layer in self._layers], updates.unbind())

    def _weight(self, updates: Tensor) -> Tensor:
        """Return the weight of the next moments in each layer's statistics, after `updates` updates in this step."""
        momenta = [layer.momentum for layer in self._layers]
        weight = numbers_on(tuple(momentum or 0.0 for momentum in momenta), updates.device)
        if None not in momenta:
            return weight
        # Without momentum a layer's statistics are the average over all updates so far.
        averages = numbers_on(tuple(momentum is None for momentum in momenta), updates.device) > 0
        tracked = torch.stack([layer.num_batches_tracked for layer in self._layers])
        return torch.where(averages, 1.0 / (tracked + updates).clamp(min=1).double(), weight)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def numbers_on(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Return nested numbers as a tensor, from a cache: the host would wait for each copy to a device."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _union(counts: Tensor, moments: Tensor) -> Tensor:
    """Return mean and unbiased variance (K, 2, W) of the union of M sets.

    Args:
        counts: Numbers of values (M, K, W).
        moments: Means and unbiased variances (M, K, 2, W).
    """
    means, unbiased = moments.unbind(2)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    squares = (unbiased * (counts - 1).clamp(min=0) + counts * (means - mean) ** 2).sum(0)
    return torch.stack([mean, squares / (total - 1).clamp(min=1)], dim=1)
