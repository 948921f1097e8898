"""What a stage's forwards change beside gradients: BatchNorm's running statistics, and other buffers.

The running statistics are as after the microbatches in turn, or as after one full batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import put_buffer, writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.moments import MomentTable

BatchNormMode = Literal["microbatch", "deferred"]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network, in the modes that its layers are in, normalises over the samples that it sees together."""
    layers = (layer for layer in network.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.training or not layer.track_running_stats for layer in layers)


class StageBuffers:
    """Keeps the buffers of a stage, on all its replicas alike.

    BatchNorm layers normalise each microbatch by itself, as in GPipe. While a step runs, the moments of each microbatch
    are noted; at its end the replicas combine them, so that each has the statistics of all microbatches:

    - ``microbatch``: as if the microbatches had run one after the other in one process;
    - ``deferred``: one update by the mean and the unbiased variance of the whole batch, as one full-batch pass makes it
      (what torchgpipe calls deferred batch normalization). Momentum keeps its meaning, whatever the number of
      microbatches.

    Of other buffers, such as the vectors of a spectral norm, all replicas go on with the first one's, as under DDP.
    Which ones change shows in the first step; constants, however large, are not sent.

    Args:
        group: The stage's replicas; None for one.
        calls: How often the stage calls each of its modules in a forward, by name.
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
        self._module = module
        # Each layer's calls in a forward; the same on all replicas, one without a microbatch in this step included.
        self._calls: dict[nn.Module, int] = {}
        self._notes: dict[nn.Module, _Notes] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a SyncBatchNorm, whose replicas would wait for each other while they run different "
                    "microbatches: use BatchNorm2d with batch_norm: deferred (trainer.sync_batchnorm: false)"
                )
            if isinstance(layer, BATCH_NORMS) and layer.track_running_stats:
                count = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                if count:  # Some are for evaluation alone.
                    self._calls[layer] = count
                    self._notes[layer] = _Notes(name, layer)
        self._training: list[nn.Module] = []
        self._moments: MomentTable | None = None
        noted = {id(buffer) for layer in self._calls for buffer in layer.buffers(recurse=False)}
        self._others = [name for name, buffer in module.named_buffers() if id(buffer) not in noted]
        self._changing: list[str] | None = None
        self._before: list[tuple[int, int]] = []

    def begin(self, microbatches: int) -> None:
        """Note what changes, and the moments of layers in training mode, until :meth:`finish` or :meth:`abandon`."""
        training = [layer for layer in self._calls if layer.training]
        if self._training != training or self._moments is None or self._moments.microbatches != microbatches:
            self._training = training
            self._moments = MomentTable([(layer, self._calls[layer]) for layer in training], microbatches)
            for index, layer in enumerate(training):
                self._notes[layer].places = self._moments.places(index)
        self._moments.clear()
        for layer in training:
            self._notes[layer].begin()
        if self.group is not None:
            self._before = self._states()

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Note the moments of the forward inside; one that runs ``again`` for its activations counts only once."""
        for layer in self._training:
            self._notes[layer].counts.clear()
        yield
        if self._moments is not None and not again:
            self._moments.note(microbatch, [self._notes[layer].counts for layer in self._training])

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics by those of the step, and share the other buffers; a collective of replicas."""
        self.abandon()
        if self._moments is not None and self._training:
            self._moments.update(self.batch_norm == "deferred", self.group)
        if self.group is not None and self._others:
            self._share_others()

    def abandon(self) -> None:
        """Give the layers their running statistics back, as they were before the step."""
        for notes in self._notes.values():
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


class _Notes:
    """The moments of one layer during a step, which the layer's own kernel writes.

    With momentum 1 it puts the moments of a call into whatever tensors it holds as running statistics. Those are the
    same for all microbatches: a compiled stage would be compiled again for others.

    Attributes:
        places: Where mean and variance of each of its calls in a forward are written.
        counts: Values per channel in each call so far.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.layer = name, layer
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
        if call == len(self.places):
            raise ConfigurationError(
                f"{self.name} normalises several times in one call of the layer that contains it: call it from a "
                "module of your own, not from a subclass of a layer of torch.nn, or use it once"
            )
        self.counts.append(inputs[0].numel() // self.layer.num_features)
        if len(self.places) > 1:
            self._put(call)

    def _put(self, call: int) -> None:
        for name, place in zip(("running_mean", "running_var"), self.places[call], strict=True):
            put_buffer(self.layer, name, place)
