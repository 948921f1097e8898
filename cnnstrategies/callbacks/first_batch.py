"""Callback that checks the size of the first global batch, and whether the processes have loaded different batches."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from cnnstrategies.callbacks.start_panel import loading
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples, samples_of
from cnnstrategies.shares.samplers import dealt
from cnnstrategies.strategies.protocol import facts_of

ELEMENTS = 1 << 16  # The checksum of a batch covers this many elements from the start of each tensor.
DRAWN = 1000  # The checksum of a sampler's order covers this many indices from the start of an epoch.


class FirstBatch(Callback):
    """Callback that checks on the first batch of a run whether the processes divide the training data correctly.

    The check finds four mistakes:

    - The size of the global batch differs from the size in the start panel, for example because a sampler divides the
      data among a different number of processes. The callback warns.
    - Two processes have loaded the same samples, for example because a sampler gives all processes the same samples.
      Each process then trains on all of the data, and more devices do not help. The callback warns.
    - Some processes have fewer batches than others. The processes with more batches would wait forever at the end of
      the epoch. The callback raises an error.
    - The sampler is seeded differently in each process. The processes then divide different orders of the samples, so
      some samples are used twice and others never. The callback raises an error if the package divides the samples, and
      warns otherwise.

    The processes exchange four numbers once in a run. If the lengths of the loaders are not known, the processes
    exchange one more number for each batch.

    Raises:
        ConfigurationError: The processes have different numbers of batches, or the package divides the samples and the
            processes have different orders of the samples.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._streams: dist.ProcessGroup | None = None
        # Whether `limit_train_batches` limits a loader of unknown length. Lightning then does not know whether a batch
        # is the last, so the processes exchange their numbers of batches at the start of a batch and not at its end.
        self._limited = False
        self._compared = trainer.world_size == 1 or trainer.overfit_batches > 0  # type: ignore[attr-defined]  # set outside the class

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._compared and not facts_of(trainer.strategy).joined_late:
            self._compare(trainer, batch, batch_idx)
        self._compared = True
        if self._limited:
            self._exchange(trainer, batch_idx + 1)

    def _compare(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        sampler = dealt(trainer)
        size = samples_of(trainer.train_dataloader, getattr(trainer, "datamodule", None))
        processes = loading(trainer, trainer.train_dataloader)
        expected = None if size is None else size * processes
        if sampler is not None:
            expected = sum(sampler.counts(batch_idx))
        strategy = trainer.strategy
        # In a pipeline, `count_samples` returns the size of the global batch on every rank, so a sum over the ranks
        # would be too large. But a pipeline's `reduce` returns the value itself, also for `reduce_op="sum"`.
        loaded = int(
            strategy.reduce(torch.tensor(float(count_samples(batch)), device=strategy.root_device), reduce_op="sum")
        )
        batches = trainer.num_training_batches
        unknown = sized_len(trainer.train_dataloader) is None
        # Ranks that run a step together have equal batches, as they should have. One of them stands for the others.
        facts = facts_of(strategy)
        checksum = 0 if facts.has_global_batches else _fingerprint(batch)
        if trainer.global_rank % facts.ranks_per_batch:
            checksum = 0
        numbers = [checksum, -1 if unknown else int(batches), _order(trainer.train_dataloader)]
        gathered = facts.gather_from_ranks(torch.tensor(numbers, device=strategy.root_device))
        checksums = gathered[:, 0].tolist()
        repeated = next((rank for rank, value in enumerate(checksums) if value and value in checksums[:rank]), None)
        check_lengths(gathered[:, 1].tolist())
        check_orders(gathered[:, 2].tolist(), sampler is not None)
        # Workers of a parameter server do not exchange lengths for each batch. If a worker waits for another worker,
        # the parameter server itself reports this.
        agrees = getattr(trainer.train_dataloader, "agrees_on_end", False)
        if -1 in gathered[:, 1] and not agrees and dist.is_initialized() and not facts.connects_hosts:
            self._streams = dist.new_group(backend="gloo")  # type: ignore[assignment]  # It is -100 outside the group.
            self._limited = isinstance(trainer.limit_train_batches, int)
        # If an epoch has a single batch, this batch may be smaller than expected, so its size is not checked.
        if expected is not None and loaded != expected and batches > 1:
            rank_zero_warn(
                f"The first global batch has {loaded} samples instead of {expected} ({processes} processes x "
                f"{size}): check whether the loader's sampler divides the data among {processes} processes"
            )
        if repeated is not None:
            rank_zero_warn(
                f"Processes {checksums.index(checksums[repeated])} and {repeated} have loaded the same first batch, so "
                "each process may be training on all of the data: make an IterableDataset yield a different part for "
                "each trainer.global_rank, and use a DistributedSampler instead of a custom sampler"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches = batch_idx + 1
        if self._streams is not None and not self._limited:
            self._exchange(trainer, batch_idx + 1 if trainer.is_last_batch else batch_idx + 2)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._limited:
            self._exchange(trainer, self._batches)
        self._batches = 0

    def _exchange(self, trainer: Trainer, least: int) -> None:
        lengths = [torch.zeros((), dtype=torch.long) for _ in range(trainer.world_size)]
        dist.all_gather(lengths, torch.tensor(least), group=self._streams)
        check_lengths([int(length) for length in lengths], " or more")


def check_lengths(lengths: Sequence[int], others: str = "") -> None:
    """Refuse different numbers of batches, because processes with more batches would wait for the others forever.

    Args:
        lengths: Each process's number of batches in an epoch; -1 if the number is not known.
        others: Text to insert after the largest number in the error message, such as " or more".

    Raises:
        ConfigurationError: The known lengths differ.
    """
    most, least = max(lengths), min(lengths)
    if most != least and least >= 0:
        raise ConfigurationError(
            f"process {lengths.index(least)} has {least} batches in an epoch, and "
            f"process {lengths.index(most)} has {most}{others}: give each process the same number of batches with a "
            f"DistributedSampler, or limit every process with --trainer.limit_train_batches={least}"
        )


def check_orders(orders: Sequence[int], dealt: bool) -> None:
    """Check that the training sampler has drawn the same order of the samples in all processes.

    Args:
        orders: Checksum of the order in each process; 0 for a process whose order is not checked.
        dealt: Whether the package divides the samples among the processes. If not, different orders cause a warning
            instead of an error.

    Raises:
        ConfigurationError: The orders differ and the package divides the samples.
    """
    if len({order for order in orders if order}) < 2:
        return
    message = (
        "the sampler of the training data has drawn different orders in different processes, so that some samples are "
        "used twice in an epoch and others never: give the sampler a generator with the same seed in all processes, or "
        "no generator"
    )
    if dealt:
        raise ConfigurationError(message)
    rank_zero_warn(message)


def _order(loader: Any) -> int:
    """Return a checksum of the order that a user's sampler has drawn.

    The result is 0 if Lightning does not divide the sampler's order among the processes, and on ranks that load
    nothing.
    """
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    wrapper = next((sampler for sampler in samplers if isinstance(sampler, DistributedSamplerWrapper)), None)
    if wrapper is None or not getattr(loader, "loads", True):  # Some ranks of a pipeline load nothing.
        return 0
    drawn: Any = wrapper.dataset
    return zlib.crc32(repr([drawn[position] for position in range(min(DRAWN, len(drawn)))]).encode())


def _fingerprint(batch: Any) -> int:
    """Return a checksum of a batch's tensors.

    The result is 0 if the tensors' values are on another rank of a pipeline.
    """
    checksum = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_sparse:
            try:
                values = leaf.detach().flatten()[:ELEMENTS].cpu().contiguous()
            except ConfigurationError:
                return 0
            checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum
