"""Keep buffers equal on all replicas of a stage: the running statistics of BatchNorm, and other buffers."""

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies._torch_private import add_all, copy_all, put_buffer, writes
from cnnstrategies.errors import ConfigurationError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm layer whose running statistics can be combined from those of microbatches.

    A class of the user's own may compute its statistics in another way, for example for each half of a batch.
    """
    return isinstance(module, BATCH_NORMS) and (
        type(module).forward is nn.BatchNorm2d.forward or _records_mean(type(module), module)
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
    microbatch are recorded. At the end of the step the replicas combine the recorded values into the mean and the
    unbiased variance of the whole batch, and each replica updates the running statistics once with this mean and
    variance. The running statistics are then the same as after one forward with the whole batch, so the layer's
    momentum has the same effect with any number of microbatches. (torchgpipe calls this method deferred batch
    normalization.)

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

    def begin(self, microbatches: int, form: Hashable = None) -> None:
        """Begin a step: from now on, record the means and variances that BatchNorm layers in training mode compute.

        Call :meth:`finish` or :meth:`abandon` at the end of the step.

        Args:
            microbatches: Number of microbatches over all replicas, including empty microbatches.
            form: Form of the batch. Steps of one form, such as all steps in training, change the same buffers.
        """
        self._form = form
        training = [record for record in self._records if record.layer.training]
        if not training:
            self._table = None
        elif self._table is None or self._training != training or self._table.microbatches != microbatches:
            self._table = StatisticsTable(training, microbatches)
        self._training = training
        if self._table is not None:
            self._table.clear()
        for record in training:
            record.begin()
        if self.group is not None:
            self._before = self._states()

    @contextmanager
    def microbatch(self, microbatch: int, again: bool = False) -> Iterator[None]:
        """Record the mean and variance of a microbatch in each BatchNorm layer. The forward runs inside this context.

        Args:
            microbatch: The microbatch.
            again: Whether the forward recomputes activations. If so, nothing is recorded, because the values of the
                microbatch's first forward were already recorded.
        """
        for record in self._training:
            record.counts.clear()
        yield
        if self._table is not None and not again:
            self._table.record(microbatch)

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
    def finish(self) -> None:
        """Update the running statistics with the whole batch, and copy other buffers from the first replica to all.

        All replicas of the stage must call this at the end of a step.
        """
        self.abandon()
        if self._table is not None:
            self._table.update(self.group)
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


@torch.no_grad()
def _note_writes(layer: nn.Module, inputs: Any, output: Any) -> None:
    """Let autograd count a write to the running statistics. torch's kernel changes them without counting."""
    for buffer in layer.buffers(recurse=False) if layer.training else ():
        buffer.mul_(1)


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
    """

    def __init__(self, name: str, layer: Any, calls: int) -> None:
        self.name, self.layer, self.calls = name, layer, calls
        self.places: list[tuple[Tensor, Tensor]] = []
        self.counts: list[int] = []
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
        layer = self.layer
        self._saved = (layer.running_mean, layer.running_var, layer.num_batches_tracked, layer.momentum)
        layer.num_batches_tracked, layer.momentum = None, 1.0
        self._put(0)

    def restore(self) -> None:
        """Restore the running statistics that the layer had before :meth:`begin`."""
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
                f"{self.name} normalises several times in one call of the layer that contains it: call {self.name} "
                "only once, or call it from a module that is not a subclass of a torch.nn layer"
            )
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
    """A table of the means and unbiased variances that BatchNorm layers have computed in a step.

    At the end of the step, :meth:`update` computes the layers' running statistics from the table. The table has an
    entry for each microbatch and each call of a layer. The channels of all layers are concatenated, so that a single
    computation on the device updates all layers, and the CPU does not have to read values from the device. For each
    entry, the table also holds the number of values per channel, which is 0 if the call was not made.

    Args:
        records: Recorders of the layers in training mode.
        microbatches: Number of microbatches over all replicas, including empty microbatches.
    """

    def __init__(self, records: Sequence[StatisticsRecorder], microbatches: int) -> None:
        self.microbatches = microbatches
        self._records = records
        self._layers = [record.layer for record in records]
        self._calls = max(record.calls for record in records)
        self._widths = [int(layer.num_features) for layer in self._layers]
        like = self._layers[0].running_mean
        self._layer_of = torch.repeat_interleave(torch.arange(len(records)), torch.tensor(self._widths)).to(like.device)
        # Means and variances of the current microbatch (calls, 2, channels). The layers write into views of this
        # tensor.
        self._current = like.new_zeros(self._calls, 2, sum(self._widths))
        self._recorded = like.new_zeros(microbatches, *self._current.shape)
        stop = 0
        for record, width in zip(records, self._widths, strict=True):
            columns = slice(stop, stop := stop + width)
            record.places = [
                (self._current[call, 0, columns], self._current[call, 1, columns]) for call in range(record.calls)
            ]
        self.clear()

    def clear(self) -> None:
        """Set all entries of the table to zero, before a new step."""
        self._recorded.zero_()
        self._counts: list[tuple[tuple[int, ...], ...]] = [
            ((0,) * len(self._layers),) * self._calls for _ in range(self.microbatches)
        ]

    def record(self, microbatch: int) -> None:
        """Copy a microbatch's means, variances and numbers of values into the table.

        Call this directly after the microbatch's forward, because the next forward overwrites these values.
        """
        self._recorded[microbatch].copy_(self._current)
        self._counts[microbatch] = tuple(
            tuple(record.counts[call] if call < len(record.counts) else 0 for record in self._records)
            for call in range(self._calls)
        )

    def update(self, group: dist.ProcessGroup | None) -> None:
        """Update the layers' running statistics with the means and variances of the whole batch.

        If a forward calls a layer several times, there is an update for each call, in the order of the calls.

        Args:
            group: Group of the stage's replicas, which must all call this; None if the stage has one replica.
        """
        recorded = self._recorded.double()  # Shape: (microbatches, calls, 2, channels).
        counts = numbers_on(tuple(self._counts), recorded.device)  # Shape: (microbatches, calls, layers).
        if group is not None:
            joined = torch.cat([counts.flatten(), recorded.flatten()])
            dist.all_reduce(joined, group=group)
            counts = joined[: counts.numel()].view_as(counts)
            recorded = joined[counts.numel() :].view_as(recorded)
        buffers = [*(layer.running_mean for layer in self._layers), *(layer.running_var for layer in self._layers)]
        running = torch.cat(buffers).view(2, -1).double()
        updates = torch.zeros_like(counts[0, 0], dtype=torch.int64)
        for batch, reached in zip(_union(counts[..., self._layer_of], recorded), counts.sum(0) > 0, strict=True):
            updates = updates + reached
            weight = self._weight(updates) * reached
            running = running.lerp(batch, weight[self._layer_of].expand_as(batch))
        copy_all(buffers, [part for row in running.to(buffers[0].dtype) for part in row.split(self._widths)])
        add_all([layer.num_batches_tracked for layer in self._layers], updates.unbind())

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


def _union(counts: Tensor, statistics: Tensor) -> Tensor:
    """Combine the means and variances of M microbatches into the mean and the variance of the whole batch.

    Args:
        counts: Number of values in each microbatch (M, K, W), for K calls and W channels.
        statistics: Mean and unbiased variance of each microbatch (M, K, 2, W).

    Returns:
        Mean and unbiased variance of all values (K, 2, W).
    """
    means, unbiased = statistics.unbind(2)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    squares = (unbiased * (counts - 1).clamp(min=0) + counts * (means - mean) ** 2).sum(0)
    return torch.stack([mean, squares / (total - 1).clamp(min=1)], dim=1)
