"""Running statistics of BatchNorm in a pipeline: as after the microbatches in turn, or as after one full batch."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError

BatchNormMode = Literal["microbatch", "deferred"]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass
class _Sample:
    """Mean and unbiased variance (C,) of one call on one microbatch, over ``count`` values per channel."""

    mean: Tensor
    unbiased: Tensor
    count: int


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
                layer.register_forward_hook(self._after)
        self._samples: dict[nn.Module, dict[tuple[int, int], _Sample]] = defaultdict(dict)
        self._saved: dict[nn.Module, tuple[Any, ...]] = {}
        self._microbatch: int | None = None
        self._made: Counter[nn.Module] = Counter()
        self._discard = False

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Note the moments of the forward that runs inside.

        Args:
            microbatch: Which microbatch it is.
            again: It is run once more for its activations, and counts only once.
        """
        self._microbatch, self._discard = microbatch, again
        self._made.clear()
        try:
            yield
        finally:
            self._microbatch = None
            for layer in list(self._saved):  # of a forward that failed
                self._restore(layer)

    @torch.no_grad()
    def finish(self, microbatches: int) -> None:
        """Update the running statistics by those of the step.

        Args:
            microbatches: Microbatches of the step over all replicas, empty ones included.
        """
        moments = [self._moments(layer, microbatches) for layer in self.calls]
        if self.group is not None and moments:
            joined = torch.cat([part.flatten() for part in moments])
            dist.all_reduce(joined, group=self.group)
            pieces = torch.split(joined, [part.numel() for part in moments])
            moments = [piece.view_as(part) for piece, part in zip(pieces, moments, strict=True)]
        for layer, rows in zip(self.calls, moments, strict=True):
            self._update(layer, rows)
        self._samples.clear()

    def _moments(self, layer: nn.Module, microbatches: int) -> Tensor:
        """For each microbatch and call: count, means, unbiased variances; zeros for those of other replicas."""
        running: Tensor = layer.running_mean  # type: ignore[assignment]
        shape = (microbatches, self.calls[layer], 1 + 2 * len(running))
        moments = torch.zeros(shape, dtype=torch.float64, device=running.device)
        for (microbatch, call), sample in self._samples[layer].items():
            moments[microbatch, call, 0] = sample.count
            moments[microbatch, call, 1:] = torch.cat([sample.mean, sample.unbiased])
        return moments

    def _update(self, layer: Any, moments: Tensor) -> None:
        moments = moments[moments[:, :, 0].amax(dim=1) > 0]  # A layer in evaluation mode has none.
        if not len(moments):
            return
        if self.batch_norm == "deferred":
            moments = _combine(moments)
        for row in moments.flatten(0, 1):
            mean, variance = row[1:].chunk(2)
            layer.num_batches_tracked.add_(1)
            weight = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
            layer.running_mean.lerp_(mean.to(layer.running_mean), weight)
            layer.running_var.lerp_(variance.to(layer.running_var), weight)

    def _before(self, layer: Any, inputs: Any) -> None:
        if not layer.training or self._microbatch is None:
            return
        # With momentum 1 the layer's own kernel writes the moments of this call into whatever lies there.
        self._saved[layer] = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.running_mean = torch.zeros_like(layer.running_mean)
        layer.running_var = torch.zeros_like(layer.running_var)
        layer.num_batches_tracked = None
        layer.momentum = 1.0

    def _after(self, layer: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        if layer not in self._saved:
            return
        mean, variance = layer.running_mean, layer.running_var
        self._restore(layer)
        call = self._made[layer]
        self._made[layer] += 1
        if not self._discard:
            assert self._microbatch is not None
            count = inputs[0].numel() // len(mean)
            self._samples[layer][self._microbatch, call] = _Sample(mean.double(), variance.double(), count)

    def _restore(self, layer: Any) -> None:
        saved = self._saved.pop(layer)
        layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum = saved


def _combine(moments: Tensor) -> Tensor:
    """The moments of the union of the microbatches (1, calls, 1 + 2 C), from those of each (M, calls, 1 + 2 C)."""
    channels = (moments.shape[2] - 1) // 2
    counts, means, unbiased = torch.split(moments, [1, channels, channels], dim=2)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total
    squares = (unbiased * (counts - 1) + counts * (means - mean) ** 2).sum(0)
    return torch.cat([total, mean, squares / (total - 1)], dim=1)[None]
