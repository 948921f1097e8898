"""What a stage's forwards change beside gradients: BatchNorm's running statistics, and other buffers."""

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
    """Whether a network, in the modes that its layers are in, normalises over the samples that it sees together."""
    layers = (layer for layer in network.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.training or not layer.track_running_stats for layer in layers)


class StageBuffers:
    """Keeps the buffers of a stage, on all its replicas alike.

    BatchNorm layers normalise each microbatch by itself, as in GPipe. While a step runs, the moments of each microbatch
    are noted; at its end the replicas combine them, and each makes one update by the mean and the unbiased variance of
    the whole batch, as one full-batch pass does (what torchgpipe calls deferred batch normalization). So momentum keeps
    its meaning, whatever the number of microbatches.

    Of other buffers, such as the vectors of a spectral norm, all replicas go on with the first one's, as under DDP.
    Which ones change shows in the first step; constants, however large, are not sent.

    Args:
        group: The stage's replicas; None for one.
        calls: How often the stage calls each of its modules in a forward, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        calls: Mapping[str, int],
    ) -> None:
        self.group = group
        self._module = module
        self._notes: list[Notes] = []
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a SyncBatchNorm, whose replicas would wait for each other while they run different "
                    "microbatches: use BatchNorm2d (trainer.sync_batchnorm: false)"
                )
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                count = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                if count:  # Some are for evaluation alone.
                    self._notes.append(Notes(name, layer, count))
        self._training: list[Notes] = []
        self._moments: MomentTable | None = None
        noted = {id(buffer) for notes in self._notes for buffer in notes.layer.buffers(recurse=False)}
        self._others = [name for name, buffer in module.named_buffers() if id(buffer) not in noted]
        self._changing: list[str] | None = None
        self._before: list[tuple[int, int]] = []

    def begin(self, microbatches: int) -> None:
        """Note what changes, and the moments of layers in training mode, until :meth:`finish` or :meth:`abandon`."""
        training = [notes for notes in self._notes if notes.layer.training]
        if not training:
            self._moments = None
        elif self._moments is None or self._training != training or self._moments.microbatches != microbatches:
            self._moments = MomentTable(training, microbatches)
        self._training = training
        if self._moments is not None:
            self._moments.clear()
        for notes in training:
            notes.begin()
        if self.group is not None:
            self._before = self._states()

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Note the moments of the forward inside; one that runs ``again`` for its activations counts only once."""
        for notes in self._training:
            notes.counts.clear()
        yield
        if self._moments is not None and not again:
            self._moments.note(microbatch)

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics by those of the step, and share the other buffers; a collective of replicas."""
        self.abandon()
        if self._moments is not None:
            self._moments.update(self.group)
        if self.group is not None and self._others:
            self._share_others()

    def abandon(self) -> None:
        """Give the layers their running statistics back, as they were before the step."""
        for notes in self._notes:
            notes.restore()

    def _share_others(self) -> None:
        changed = [now != before for now, before in zip(self._states(), self._before, strict=True)]
        if self._changing is None:
            device = self._module.get_buffer(self._others[0]).device
            flags = torch.tensor(changed, dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            self._changing = [name for name, flag in zip(self._others, flags.tolist(), strict=True) if flag]
        late = {name for name, one in zip(self._others, changed, strict=True) if one} - set(self._changing)
        if late:
            raise ConfigurationError(
                f"the buffer {min(late)} has changed, and did not in the first step: the replicas of a stage would "
                "part; change it in every step, or give the stage one replica"
            )
        for name in self._changing:
            whole = self._module.get_buffer(name).contiguous()
            dist.broadcast(whole, group=self.group, group_src=0)
            self._module.get_buffer(name).copy_(whole)

    def _states(self) -> list[tuple[int, int]]:
        """Which tensor each other buffer is, and how often it was written to; autograd counts that."""
        return [(id(one), writes(one)) for one in map(self._module.get_buffer, self._others)]


class Notes:
    """The moments of one layer during a step, which the layer's own kernel writes.

    With momentum 1 it puts the moments of a call into whatever tensors it holds as running statistics. Those are the
    same for all microbatches: a compiled stage would be compiled again for others.

    Attributes:
        calls: Of the layer in a forward; the same on all replicas, one without a microbatch in this step included.
        places: Where mean and variance (C,) of each of them are written.
        counts: Values per channel in each call so far.
    """

    def __init__(self, name: str, layer: Any, calls: int) -> None:
        self.name, self.layer, self.calls = name, layer, calls
        self.places: list[tuple[Tensor, Tensor]] = []
        self.counts: list[int] = []
        self._saved: tuple[Any, ...] | None = None
        layer.register_forward_pre_hook(self._before)

    def begin(self) -> None:
        """Set the running statistics aside."""
        layer = self.layer
        self._saved = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.num_batches_tracked, layer.momentum = None, 1.0
        self._put(0)

    def restore(self) -> None:
        """Give the layer its running statistics back."""
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
                "module of your own, not from a subclass of a layer of torch.nn, or use it once"
            )
        self.counts.append(inputs[0].numel() // self.layer.num_features)
        if self.calls > 1:
            self._put(call)

    def _put(self, call: int) -> None:
        for name, place in zip(("running_mean", "running_var"), self.places[call], strict=True):
            put_buffer(self.layer, name, place)


class MomentTable:
    """Means and unbiased variances of each call of each layer in each microbatch, and what they make of the statistics.

    All layers stand side by side, with a column for each channel, so that everything is computed for all at once; on
    the device, and without looking at a value. ``counts`` has for each microbatch, call and layer the values per
    channel, 0 where the layer was not reached.
    """

    def __init__(self, notes: Sequence[Notes], microbatches: int) -> None:
        self.microbatches = microbatches
        self._notes = notes
        self._layers = [one.layer for one in notes]
        self._calls = max(one.calls for one in notes)
        self._widths = [int(layer.num_features) for layer in self._layers]
        like = self._layers[0].running_mean
        self._layer_of = torch.repeat_interleave(torch.arange(len(notes)), torch.tensor(self._widths)).to(like.device)
        self._present = like.new_zeros(self._calls, 2, sum(self._widths))
        self._moments = like.new_zeros(microbatches, *self._present.shape)
        stop = 0
        for one, width in zip(notes, self._widths, strict=True):
            own = slice(stop, stop := stop + width)
            one.places = [(self._present[call, 0, own], self._present[call, 1, own]) for call in range(one.calls)]
        self.clear()

    def clear(self) -> None:
        """Start from none."""
        self._moments.zero_()
        self._counts: list[tuple[tuple[int, ...], ...]] = [
            ((0,) * len(self._layers),) * self._calls for _ in range(self.microbatches)
        ]

    def note(self, microbatch: int) -> None:
        """Keep what the layers have put there in a microbatch."""
        self._moments[microbatch].copy_(self._present)
        self._counts[microbatch] = tuple(
            tuple(one.counts[call] if call < len(one.counts) else 0 for one in self._notes)
            for call in range(self._calls)
        )

    def update(self, group: dist.ProcessGroup | None) -> None:
        """Update the running statistics by the union of all microbatches, one call of a layer after the other."""
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
        copy_all(buffers, [part for one in statistics.to(buffers[0].dtype) for part in one.split(self._widths)])
        add_all([layer.num_batches_tracked for layer in self._layers], updates.unbind())

    def _weight(self, updates: Tensor) -> Tensor:
        """How much the next moments count in each layer's statistics, which has had so many updates in this step."""
        momenta = [layer.momentum for layer in self._layers]
        weight = numbers_on(tuple(one or 0.0 for one in momenta), updates.device)
        if None not in momenta:
            return weight
        averages = numbers_on(tuple(one is None for one in momenta), updates.device) > 0  # of all updates so far
        tracked = torch.stack([layer.num_batches_tracked for layer in self._layers])
        return torch.where(averages, 1.0 / (tracked + updates).clamp(min=1).double(), weight)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def numbers_on(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Nested numbers as a tensor; kept, because the host would wait for each copy to a device."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _union(counts: Tensor, moments: Tensor) -> Tensor:
    """Mean and unbiased variance (K, 2, W) of the union of M sets with counts (M, K, W) and moments (M, K, 2, W)."""
    means, unbiased = moments.unbind(2)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    squares = (unbiased * (counts - 1).clamp(min=0) + counts * (means - mean) ** 2).sum(0)
    return torch.stack([mean, squares / (total - 1).clamp(min=1)], dim=1)
