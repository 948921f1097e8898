"""Running statistics of BatchNorm in a pipeline: as after the microbatches in turn, or as after one full batch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError

BatchNormMode = Literal["microbatch", "deferred"]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
                self.calls[layer] = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                layer.register_forward_pre_hook(self._before)
        self._noted: dict[nn.Module, _Noted] = {}
        self._row: int | None = None
        self._made: Counter[nn.Module] = Counter()

    def begin(self, microbatches: int) -> None:
        """Have the layers that are in training mode note their moments until :meth:`finish` or :meth:`abandon`.

        Args:
            microbatches: Microbatches of the step over all replicas, empty ones included.
        """
        for layer, calls in self.calls.items():
            if layer.training:
                running: Any = layer.running_mean
                # The last row is for what is run again, and not looked at.
                moments = torch.zeros(
                    microbatches + 1, calls, 2, len(running), dtype=running.dtype, device=running.device
                )
                self._noted[layer] = _Noted(layer, moments)

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
        moments = [noted.rows() for noted in self._noted.values()]
        layers = list(self._noted)
        self.abandon()
        if self.group is not None and moments:
            joined = torch.cat([part.flatten() for part in moments])
            dist.all_reduce(joined, group=self.group)
            pieces = torch.split(joined, [part.numel() for part in moments])
            moments = [piece.view_as(part) for piece, part in zip(pieces, moments, strict=True)]
        for layer, rows in zip(layers, moments, strict=True):
            self._update(layer, rows)

    def abandon(self) -> None:
        """Give the layers their running statistics back, as they were before the step."""
        for noted in self._noted.values():
            noted.restore()
        self._noted.clear()

    def _before(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self._row is not None and layer in self._noted:
            self._noted[layer].note(self._row, self._made[layer], inputs[0])
            self._made[layer] += 1

    def _update(self, layer: Any, moments: Tensor) -> None:
        moments = moments[moments[:, :, 0].amax(dim=1) > 0]  # A layer that was not reached has none.
        if not len(moments):
            return
        if self.batch_norm == "deferred":
            moments = _combine(moments)
        rows = moments.flatten(0, 1)
        # What is left of the old value, and what each of the updates in turn adds to it.
        kept, shares = 1.0, []
        tracked = int(layer.num_batches_tracked)
        for index in range(len(rows), 0, -1):
            weight = layer.momentum if layer.momentum is not None else 1.0 / (tracked + index)
            shares.append(kept * weight)
            kept *= 1.0 - weight
        added = torch.tensor(shares[::-1], dtype=rows.dtype, device=rows.device) @ rows[:, 1:]
        mean, variance = added.chunk(2)
        layer.num_batches_tracked.add_(len(rows))
        layer.running_mean.mul_(kept).add_(mean)
        layer.running_var.mul_(kept).add_(variance)


class _Noted:
    """The moments of one layer during a step, which the layer's own kernel writes.

    With momentum 1 it puts the moments of a call into whatever tensors it holds as running statistics.

    Args:
        layer: The layer.
        moments: Zeros (microbatches + 1, calls, 2, C): mean and unbiased variance of each call on each microbatch.
    """

    def __init__(self, layer: Any, moments: Tensor) -> None:
        self.layer = layer
        self.moments = moments
        self.counts = torch.zeros(*moments.shape[:2], 1, dtype=torch.float64)
        self.saved = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.num_batches_tracked, layer.momentum = None, 1.0

    def note(self, row: int, call: int, images: Tensor) -> None:
        """Have the next call write into a row."""
        self.layer.running_mean, self.layer.running_var = self.moments[row, call].unbind()
        self.counts[row, call] = images.numel() // self.moments.shape[3]

    def rows(self) -> Tensor:
        """Count, means and unbiased variances (microbatches, calls, 1 + 2 C); zeros for those of other replicas."""
        counts = self.counts.to(self.moments.device)
        return torch.cat([counts, self.moments.flatten(2).double()], dim=2)[:-1]

    def restore(self) -> None:
        """Give the layer its running statistics back."""
        layer = self.layer
        layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = self.saved


def _combine(moments: Tensor) -> Tensor:
    """The moments of the union of the microbatches (1, calls, 1 + 2 C), from those of each (M, calls, 1 + 2 C)."""
    channels = (moments.shape[2] - 1) // 2
    counts, means, unbiased = torch.split(moments, [1, channels, channels], dim=2)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squares = (unbiased * (counts - 1) + counts * (means - mean) ** 2).sum(0)
    return torch.cat([total, mean, squares / (total - 1)], dim=1)[None]
