"""Running statistics of BatchNorm in a pipeline: as after the microbatches in turn, or as after one full batch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError

BatchNormMode = Literal["microbatch", "deferred"]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network, in the modes that its layers are in, normalises over the samples that it sees together."""
    layers = (layer for layer in network.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.training or not layer.track_running_stats for layer in layers)


class RunningStatistics:
    """Keeps the running statistics of a stage's BatchNorm layers, on all its replicas alike.

    The layers normalise each microbatch by itself, as in GPipe. While a step runs, the moments of each microbatch are
    noted; at its end the replicas combine them, so that each has the statistics of all microbatches:

    - ``microbatch``: as if the microbatches had run one after the other in one process;
    - ``deferred``: one update by the mean and the unbiased variance of the whole batch, as one full-batch pass makes it
      (what torchgpipe calls deferred batch normalization). Momentum keeps its meaning, whatever the number of
      microbatches.

    Args:
        module: The stage.
        batch_norm: Which of the two.
        group: The stage's replicas; None for one.
        calls: How often the stage calls each of its modules in a forward, by name.

    Raises:
        ConfigurationError: The stage holds a SyncBatchNorm, whose replicas would wait for each other.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_norm: BatchNormMode,
        group: dist.ProcessGroup | None,
        calls: Mapping[str, int],
    ) -> None:
        self.batch_norm = batch_norm
        self.group = group
        # Each layer's calls in a forward; the same on all replicas, one without a microbatch in this step included.
        self.calls: dict[nn.Module, int] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a SyncBatchNorm, whose replicas would wait for each other while they run different "
                    "microbatches: use BatchNorm2d with batch_norm: deferred (trainer.sync_batchnorm: false)"
                )
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                count = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                if count:  # Some are for evaluation alone.
                    self.calls[layer] = count
                    layer.register_forward_pre_hook(self._before)
        self._names = {layer: name for name, layer in module.named_modules() if layer in self.calls}
        self._layers: dict[nn.Module, _Noted] = {}
        self._moments = torch.empty(0)
        self._row: int | None = None
        self._made: Counter[nn.Module] = Counter()

    @property
    def buffers(self) -> list[Tensor]:
        """Those that it keeps."""
        return [buffer for layer in self.calls for buffer in layer.buffers(recurse=False)]

    def begin(self, microbatches: int) -> None:
        """Have the layers that are in training mode note their moments until :meth:`finish` or :meth:`abandon`.

        Args:
            microbatches: Microbatches of the step over all replicas, empty ones included.
        """
        training = [layer for layer in self.calls if layer.training]
        if list(self._layers) != training or len(self._moments) != microbatches + 1:
            self._allocate(training, microbatches)
        self._moments.zero_()
        for noted in self._layers.values():
            noted.begin()

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Note the moments of the forward that runs inside.

        Args:
            microbatch: Which microbatch it is.
            again: It is run once more for its activations, and counts only once.
        """
        self._row = -1 if again else microbatch
        self._made.clear()
        try:
            yield
        finally:
            self._row = None

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics by those of the step."""
        self.abandon()
        if not self._layers:
            return
        moments = self._moments[:-1].double()
        noted = list(self._layers.values())
        counts = torch.tensor([row for one in noted for row in zip(*one.counts[:-1], strict=True)], dtype=torch.float64)
        if self.group is not None:
            joined = torch.cat([counts.to(moments.device).flatten(), moments.flatten()])
            dist.all_reduce(joined, group=self.group)
            counts = joined[: counts.numel()].view_as(counts).cpu()
            moments = joined[counts.numel() :].view_as(moments)
        of_calls = iter(counts.tolist())
        for one in noted:
            one.update(moments, [next(of_calls) for _ in range(one.calls)], self.batch_norm)

    def abandon(self) -> None:
        """Give the layers their running statistics back, as they were before the step."""
        for noted in self._layers.values():
            noted.restore()

    def _allocate(self, layers: Sequence[nn.Module], microbatches: int) -> None:
        widths = [self.calls[layer] * 2 * int(layer.num_features) for layer in layers]  # type: ignore[arg-type]
        like: Any = layers[0].running_mean if layers else torch.empty(0)
        # The last row is for what is run again, and not looked at.
        self._moments = torch.zeros(microbatches + 1, sum(widths), dtype=like.dtype, device=like.device)
        self._layers, start = {}, 0
        for layer, width in zip(layers, widths, strict=True):
            self._layers[layer] = _Noted(layer, self.calls[layer], slice(start, start + width), self._moments)
            start += width

    def _before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._row is not None and layer in self._layers:
            if self._made[layer] == self.calls[layer]:
                raise ConfigurationError(
                    f"{self._names[layer]} normalises several times in one call of the layer that contains it: call "
                    "it from a module of your own, not from a subclass of a layer of torch.nn, or use it once"
                )
            self._layers[layer].note(self._row, self._made[layer], inputs[0])
            self._made[layer] += 1


class _Noted:
    """The moments of one layer during a step, which the layer's own kernel writes.

    With momentum 1 it puts the moments of a call into whatever tensors it holds as running statistics.

    Args:
        layer: The layer.
        calls: Its calls in a forward.
        columns: Its part of ``moments``: for each call C means and C unbiased variances.
        moments: A row for each microbatch, and one to spare.
    """

    def __init__(self, layer: Any, calls: int, columns: slice, moments: Tensor) -> None:
        self.layer = layer
        self.calls = calls
        self.columns = columns
        self.rows = [self._split(row[columns]) for row in moments]
        self.counts: list[list[float]] = []
        self.saved: tuple[Any, ...] | None = None

    def begin(self) -> None:
        """Set the running statistics aside."""
        layer = self.layer
        self.counts = [[0.0] * self.calls for _ in self.rows]
        self.saved = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.num_batches_tracked, layer.momentum = None, 1.0

    def note(self, row: int, call: int, images: Tensor) -> None:
        """Have the next call write into a row."""
        self.layer.running_mean, self.layer.running_var = self.rows[row][call]
        self.counts[row][call] = images.numel() / self.layer.num_features

    def restore(self) -> None:
        """Give the layer its running statistics back."""
        if self.saved is not None:
            layer = self.layer
            layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = self.saved
            self.saved = None

    def update(self, moments: Tensor, counts: list[list[float]], batch_norm: BatchNormMode) -> None:
        """Update the running statistics.

        Args:
            moments: Those of all layers (microbatches, columns).
            counts: For each call its values per channel in each microbatch; 0 where the layer was not reached.
            batch_norm: By all microbatches in turn, or by their union.
        """
        reached = [row for row, count in enumerate(counts[0]) if count]
        if not reached:
            return
        own = [self._split(moments[row, self.columns]) for row in reached]
        if batch_norm == "deferred":
            samples = [[of_call[row] for row in reached] for of_call in counts]
            own = [[_union(samples[call], [row[call] for row in own]) for call in range(self.calls)]]
        updates = [moment for row in own for moment in row]
        layer = self.layer
        # What is left of the old value, and what each of the updates in turn adds to it.
        kept, shares = 1.0, []
        tracked = int(layer.num_batches_tracked)
        for index in range(len(updates), 0, -1):
            weight = layer.momentum if layer.momentum is not None else 1.0 / (tracked + index)
            shares.append(kept * weight)
            kept *= 1.0 - weight
        layer.num_batches_tracked.add_(len(updates))
        for part, running in enumerate((layer.running_mean, layer.running_var)):
            rows = torch.stack([update[part] for update in updates])
            running.mul_(kept).add_(torch.tensor(shares[::-1], dtype=rows.dtype, device=rows.device) @ rows)

    def _split(self, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Mean and variance (C,) of each call."""
        parts = row.view(self.calls, 2, -1).unbind()
        return [(part[0], part[1]) for part in parts]


def _union(counts: list[float], moments: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (C,) of the union of samples, from those of each."""
    means = torch.stack([mean for mean, _ in moments])
    unbiased = torch.stack([variance for _, variance in moments])
    count = torch.tensor(counts, dtype=means.dtype, device=means.device)[:, None]
    total = sum(counts)
    mean = (count * means).sum(0) / total
    squares = (unbiased * (count - 1) + count * (means - mean) ** 2).sum(0)
    return mean, squares / (total - 1)
