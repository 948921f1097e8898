"""Keep buffers equal on all replicas of a stage: the running statistics of BatchNorm, and other buffers."""

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from cnnstrategies._torch_private import put_buffer, writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_statistics import StatisticsRecorder, StatisticsTable

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Layers that a module which runs as a whole calls several times. Their statistics cannot be combined.
_left: "WeakSet[nn.Module]" = WeakSet()


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm layer whose running statistics can be combined from those of microbatches.

    A class of the user's own may compute its statistics in another way, for example for each half of a batch.
    """
    return (
        isinstance(module, BATCH_NORMS)
        and module not in _left
        and (type(module).forward is nn.BatchNorm2d.forward or _records_mean(type(module), module))
    )


def _records_mean(kind: type[nn.Module], layer: nn.Module) -> bool:
    """Whether layers of a class, in training mode and with momentum 1, set the running mean to the mean of a batch.

    True if the layer does not keep running statistics, or if its forward cannot run in a trial.
    """
    if kind not in _trials:
        trial: Any = copy.copy(layer)
        state = vars(trial)
        state["_parameters"] = {
            n: None if p is None else torch.ones(p.shape) for n, p in layer.named_parameters(recurse=False)
        }
        state["_buffers"] = {name: torch.zeros(b.shape) for name, b in layer.named_buffers(recurse=False)}
        state |= {"training": True, "momentum": 1.0}
        put_buffer(trial, "num_batches_tracked", None)
        channels = int(getattr(layer, "num_features", 1))
        dims = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
        sizes = next((2,) * count for base, count in dims.items() if isinstance(layer, base))
        images = torch.arange(4.0 * channels * 2 ** len(sizes)).sin().view(4, channels, *sizes)
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                kind.forward(trial, images)
            present = trial.running_mean
            mean = images.transpose(0, 1).flatten(1).mean(1)
            _trials[kind] = present is None or torch.allclose(present, mean, atol=1e-4)
        except Exception:
            _trials[kind] = True
    return _trials[kind]


# Results of `_records_mean`, by class.
_trials: dict[type[nn.Module], bool] = {}


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a network has a BatchNorm layer that normalises with the mean and variance of each microbatch.

    These are the layers in training mode, and the layers without running statistics.
    """
    layers = (layer for layer in network.modules() if isinstance(layer, BATCH_NORMS))
    return any(layer.training or not layer.track_running_stats for layer in layers)


class StageBuffers:
    """The buffers of a stage, which are kept equal on all replicas of the stage.

    BatchNorm layers normalise each microbatch separately, as in GPipe. During a step, the mean and variance of each
    microbatch are recorded. After its forwards each replica merges those of its own microbatches, and sends the result
    to the other replicas, if possible while its last backward runs. At the end of the step each replica has the mean
    and the unbiased variance of the whole batch, and updates the running statistics once with them. The running
    statistics are then the same as after one forward with the whole batch, so the layer's momentum has the same effect
    with any number of microbatches. (torchgpipe calls this method deferred batch normalization.)

    Other buffers, such as the vectors of a spectral norm, are copied from the first replica to the other replicas after
    each step, as under DDP. The first step of each form shows which buffers change. Other buffers are not copied.

    Args:
        module: The stage.
        group: Group of the stage's replicas; None if the stage has one replica.
        calls: For each module, by name: how often one forward of the stage calls the module.

    Attributes:
        copies_others: Whether other buffers are copied. They need no copy if all replicas have set them to the values
            of the whole batch.

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
        self.copies_others = True
        self._module = module
        self._records: list[StatisticsRecorder] = []
        for name, layer in module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                raise ConfigurationError(
                    f"{name} is a SyncBatchNorm layer, so replicas would wait for each other while they run different "
                    "microbatches: use BatchNorm2d (trainer.sync_batchnorm: false)"
                )
            if isinstance(layer, BATCH_NORMS) and not is_batch_norm(layer):
                layer.register_forward_hook(_note_writes)
            elif is_batch_norm(layer) and layer.track_running_stats:
                count = sum(calls[path] for path in calls if name == path or name.startswith(path + "."))
                # A layer that the stage never calls in training computes no statistics, so it needs no recorder.
                if count:
                    self._records.append(StatisticsRecorder(name, layer, count))
        self._training: list[StatisticsRecorder] = []
        self._table: StatisticsTable | None = None
        recorded = {id(buffer) for record in self._records for buffer in record.layer.buffers(recurse=False)}
        self._others = [name for name, buffer in module.named_buffers() if id(buffer) not in recorded]
        self._form: Hashable = None
        self._changing: dict[Hashable, list[str]] = {}  # By form: buffers that changed in the first step.
        self._before: list[tuple[int, int]] = []

    def begin(self, form: Hashable = None) -> None:
        """Begin a step: from now on, record the means and variances that BatchNorm layers in training mode compute.

        Call :meth:`finish` or :meth:`abandon` at the end of the step.

        Args:
            form: Form of the batch. Steps of one form, such as all steps in training, change the same buffers.
        """
        self._form = form
        training = [record for record in self._records if record.layer.training]
        if not training:
            self._table = None
        elif self._table is None or self._training != training:
            self._table = StatisticsTable(training)
        self._training = training
        if self._table is not None:
            self._table.clear()
        for record in training:
            record.begin()
        if self.group is not None and self.copies_others:
            self._before = self._states()

    @property
    def called_often(self) -> list[str]:
        """Names of the BatchNorm layers that a forward has called more often than the graph of the stage shows."""
        return [record.name for record in self._records if record.has_more_calls]

    def leave(self, names: Iterable[str]) -> None:
        """From now on, let BatchNorm layers change their own statistics, as other layers change buffers.

        Args:
            names: Names of layers, also of other stages. All ranks must call this with the same names.
        """
        self.abandon()
        for record in [record for record in self._records if record.name in names]:
            self._records.remove(record)
            record.layer.register_forward_hook(_note_writes)
        self._training, self._table = [], None

    @contextmanager
    def microbatch(self, again: bool = False) -> Iterator[None]:
        """Record the mean and variance of a microbatch in each BatchNorm layer. The forward runs inside this context.

        Args:
            again: Whether the forward recomputes activations. If so, nothing is recorded, because the values of the
                microbatch's first forward were already recorded.
        """
        # A probe may run inside of a microbatch's first forward, which has its own numbers of values.
        before = [(record, [*record.counts]) for record in self._training if again]
        for record in self._training:
            record.counts.clear()
        yield
        for record, counts in before:
            record.counts[:] = counts
        if self._table is not None and not again:
            self._table.record()

    @property
    def recorders(self) -> Sequence["StatisticsRecorder"]:
        """Recorders of the layers that were in training mode at the start of the last step."""
        return self._training

    @contextmanager
    def again(self, recorders: Sequence["StatisticsRecorder"]) -> Iterator[None]:
        """Return a context for a forward that recomputes activations, also after the end of the step.

        The forward changes no running statistics and records nothing.

        Args:
            recorders: Result of :attr:`recorders` in the step of the first forward.
        """
        idle = [recorder for recorder in recorders if not recorder.is_active]
        for recorder in idle:
            recorder.begin()
        try:
            for recorder in recorders:
                recorder.counts.clear()
            yield
        finally:
            for recorder in idle:
                recorder.restore()

    @torch.no_grad()
    def send(self) -> None:
        """Begin to send the other replicas the mean and variance of this replica's microbatches.

        All replicas must call this after their last forward, or call :meth:`finish`. No replica may begin other
        collectives of the group between its last forward and this call.
        """
        if self._table is not None:
            self._table.send(self.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Update the running statistics with the whole batch, and copy other buffers from the first replica to all.

        All replicas of the stage must call this at the end of a step.
        """
        self.send()
        self.abandon()
        if names := self.called_often:
            raise ConfigurationError(f"{calls_several_times(names)}: use a BatchNorm layer of its own for each call")
        if self._table is not None:
            self._table.update()
        if self.group is not None and self._others and self.copies_others:
            self._copy_others()

    def abandon(self) -> None:
        """Restore the running statistics that the BatchNorm layers had before the step."""
        for record in self._records:
            record.restore()

    def _copy_others(self) -> None:
        """Copy the buffers that changed in the first step, except BatchNorm's buffers, from the first replica to all.

        Raises:
            ConfigurationError: A buffer has changed that did not change in the first step.
        """
        changed = [state != before for state, before in zip(self._states(), self._before, strict=True)]
        if self._form not in self._changing:
            device = self._module.get_buffer(self._others[0]).device
            flags = torch.tensor(changed, dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            self._changing[self._form] = [name for name, flag in zip(self._others, flags.tolist(), strict=True) if flag]
        changing = self._changing[self._form]
        late = {name for name, is_changed in zip(self._others, changed, strict=True) if is_changed} - set(changing)
        if late:
            raise ConfigurationError(
                f"the buffer {min(late)} has changed, but did not change in the first step, and only buffers that "
                "change in the first step are copied to all replicas of a stage: change it in every step, or give the "
                "stage one replica"
            )
        for name in changing:
            values = self._module.get_buffer(name).contiguous()
            dist.broadcast(values, group=self.group, group_src=0)
            self._module.get_buffer(name).copy_(values)

    def _states(self) -> list[tuple[int, int]]:
        """Return the id of each buffer, and the number of writes to the buffer, for all buffers except BatchNorm's.

        A buffer has changed if its id or its number of writes has changed. Autograd counts the writes.
        """
        return [(id(buffer), writes(buffer)) for buffer in map(self._module.get_buffer, self._others)]


def calls_several_times(names: Sequence[str]) -> str:
    """Return the reason why BatchNorm layers need the whole batch."""
    return ", ".join(names) + _SEVERAL_TIMES


def leave_statistics(network: nn.Module, reason: str) -> list[str]:
    """Leave the statistics of BatchNorm layers to the layers, if a result of `calls_several_times` names the layers.

    Args:
        network: The network.
        reason: Why the network runs batches as one microbatch.

    Returns:
        The names.
    """
    if not reason.endswith(_SEVERAL_TIMES):
        return []
    names = reason.removesuffix(_SEVERAL_TIMES).split(", ")
    _left.update(map(network.get_submodule, names))
    return names


_SEVERAL_TIMES = " normalises several times in one call of the module that contains it"


@torch.no_grad()
def _note_writes(layer: nn.Module, inputs: Any, output: Any) -> None:
    """Let autograd count a write to the running statistics. torch's kernel changes them without counting."""
    for buffer in layer.buffers(recurse=False) if layer.training else ():
        buffer.mul_(1)
