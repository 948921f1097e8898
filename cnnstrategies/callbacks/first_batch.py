"""A check of the first batches that the processes load against the start panel and against each other."""

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
from cnnstrategies.data.sampling import dealt
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples, samples_of
from cnnstrategies.strategies.protocol import facts_of

ELEMENTS = 1 << 16  # largest number of elements of each tensor that are compared
DRAWN = 1000  # largest number of an epoch's samples whose order is compared


class FirstBatch(Callback):
    """Warns of first batches that differ from what the start panel says, and refuses batches that cannot be trained on.

    The check finds four mistakes:

    - The global batch has another size, as with a sampler that divides the data among another number of processes.
    - Two processes have loaded the same samples, as with an ``IterableDataset`` that does not ask which process reads
      it. Each process then trains on all of the data, and more devices gain nothing.
    - A process has fewer batches than another, which would wait for it at the end of the epoch.
    - The sampler is seeded differently in each process, so that each process takes its part of a different order. This
      is refused where the package divides the samples, and otherwise a warning.

    The processes exchange four numbers once in a run. If their loaders do not know their lengths, they exchange one
    more number for each batch.

    Raises:
        ConfigurationError: The processes have different numbers of batches, or different orders of the samples that
            are divided among them.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._streams: dist.ProcessGroup | None = None
        # Whether `limit_train_batches` limits a stream. Lightning then notices the stream's end only when it asks for
        # the next batch.
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
        expected = None if size is None else size * loading(trainer)
        if sampler is not None:
            expected = sum(sampler.counts(batch_idx))
        strategy = trainer.strategy
        # Every rank of a pipeline counts the whole batch, so a pipeline's `reduce` gives the mean in place of a sum.
        loaded = int(
            strategy.reduce(torch.tensor(float(count_samples(batch)), device=strategy.root_device), reduce_op="sum")
        )
        batches = trainer.num_training_batches
        unknown = sized_len(trainer.train_dataloader) is None
        numbers = [_fingerprint(batch), -1 if unknown else int(batches), _order(trainer.train_dataloader)]
        gathered = strategy.all_gather(torch.tensor(numbers, device=strategy.root_device)).reshape(-1, 3)
        marks = gathered[:, 0].tolist()
        repeated = next((rank for rank, mark in enumerate(marks) if mark and mark in marks[:rank]), None)
        check_lengths(gathered[:, 1].tolist())
        check_orders(gathered[:, 2].tolist(), sampler is not None)
        # A parameter server has no process group. It reports by itself which worker waits for which.
        if -1 in gathered[:, 1] and dist.is_initialized():
            self._streams = dist.new_group(backend="gloo")  # type: ignore[assignment]  # -100 outside the group
            self._limited = isinstance(trainer.limit_train_batches, int)
        if expected is not None and loaded != expected and batches > 1:  # An epoch's last batch may be smaller.
            rank_zero_warn(
                f"The first global batch has {loaded} samples and not {expected} ({loading(trainer)} processes x "
                f"{size}): check the loader's sampler, which may divide the data among another number of processes"
            )
        if repeated is not None:
            rank_zero_warn(
                f"Processes {marks.index(marks[repeated])} and {repeated} have loaded the same first batch, so each "
                "may train on all the data: an IterableDataset must give each process its own part "
                "(torch.distributed.get_rank()), and so must a custom sampler (DistributedSampler)"
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
    """Refuse an epoch that is longer for one process than for another: the processes would wait for each other forever.

    Args:
        lengths: Number of batches of each process; -1 if the process does not know it.
        others: Text after the largest number in the message.

    Raises:
        ConfigurationError: The known lengths differ.
    """
    most, least = max(lengths), min(lengths)
    if most != least and least >= 0:
        raise ConfigurationError(
            f"process {lengths.index(least)} has {least} batches an epoch, "
            f"process {lengths.index(most)} has {most}{others}: give each process the same number, as a "
            f"DistributedSampler does, or limit every process with --trainer.limit_train_batches={least}"
        )


def check_orders(orders: Sequence[int], dealt: bool) -> None:
    """Refuse different orders of the samples if the package divides the samples, and warn of them otherwise.

    Args:
        orders: Checksum of each process's order; 0 if the process has none.
        dealt: Whether the package divides the samples among the processes.

    Raises:
        ConfigurationError: The orders differ and the package divides the samples.
    """
    if len({order for order in orders if order}) < 2:
        return
    message = (
        "the sampler of the training data has drawn a different order in each process, and each process takes its part "
        "of its own order: some samples come twice and others never; seed the sampler alike in all processes, or give "
        "it no generator"
    )
    if dealt:
        raise ConfigurationError(message)
    rank_zero_warn(message)


def _order(loader: Any) -> int:
    """Return a checksum of the order of a user's sampler that is divided among the processes; 0 without one."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    wrapper = next((sampler for sampler in samplers if isinstance(sampler, DistributedSamplerWrapper)), None)
    if wrapper is None or not getattr(loader, "loads", True):  # Some ranks of a pipeline load nothing.
        return 0
    drawn: Any = wrapper.dataset
    return zlib.crc32(repr([drawn[position] for position in range(min(DRAWN, len(drawn)))]).encode())


def _fingerprint(batch: Any) -> int:
    """Return a checksum of a batch's samples; 0 if another rank of a pipeline holds the values."""
    mark = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_sparse:
            try:
                values = leaf.detach().flatten()[:ELEMENTS].cpu().contiguous()
            except ConfigurationError:
                return 0
            mark = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), mark)
    return mark
