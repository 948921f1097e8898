"""What was loaded first, against what the start panel has said of it."""

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

BYTES = 1 << 16  # of each tensor that are looked at
DRAWN = 1000  # of an epoch's samples, that are looked at


class FirstBatch(Callback):
    """Warns when the processes of a run have loaded other batches than the start panel says, or refuses these.

    The global batch has another size, as with a sampler that deals to another number of processes; or two processes
    have the same samples, as with an ``IterableDataset`` that does not ask which process reads it: each then trains on
    all of the data, and more devices bring nothing. Where one has fewer batches than another, that would wait for it at
    the end. A sampler that is seeded differently in each process has each take its part of an order of its own, which
    is refused where the samples are dealt. Once in a run, by an exchange of four numbers; where streams do not know
    their lengths, of one more for each batch.

    Raises:
        ConfigurationError: The processes have different numbers of batches, or orders of which their parts are dealt.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._streams: dist.ProcessGroup | None = None
        self._limited = False  # Lightning then learns of a stream's end by asking for one batch more.
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
        # A pipeline's ranks all count the whole batch, and its sum is their mean.
        found = int(
            strategy.reduce(torch.tensor(float(count_samples(batch)), device=strategy.root_device), reduce_op="sum")
        )
        batches = trainer.num_training_batches
        unknown = sized_len(trainer.train_dataloader) is None
        own = [_fingerprint(batch), -1 if unknown else int(batches), _order(trainer.train_dataloader)]
        of_all = strategy.all_gather(torch.tensor(own, device=strategy.root_device)).reshape(-1, 3)
        marks = of_all[:, 0].tolist()
        alike = next((rank for rank, mark in enumerate(marks) if mark and mark in marks[:rank]), None)
        check_lengths(of_all[:, 1].tolist())
        check_orders(of_all[:, 2].tolist(), sampler is not None)
        # A pipeline shares its batches, and a parameter server names who waits for whom.
        if -1 in of_all[:, 1] and dist.is_initialized():
            self._streams = dist.new_group(backend="gloo")  # type: ignore[assignment]  # -100 is for those outside
            self._limited = isinstance(trainer.limit_train_batches, int)
        if expected is not None and found != expected and batches > 1:  # The last one may be smaller.
            rank_zero_warn(
                f"The first global batch has {found} samples, and not {expected} ({loading(trainer)} processes x "
                f"{size}): look at the loader's sampler, which may deal to another number of processes"
            )
        if alike is not None:
            rank_zero_warn(
                f"Processes {marks.index(marks[alike])} and {alike} have loaded the same first batch, so each may "
                "train on all the data: an IterableDataset must give each process its own part "
                "(torch.distributed.get_rank()), a loader's own sampler likewise (DistributedSampler)"
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
        of_all = [torch.zeros((), dtype=torch.long) for _ in range(trainer.world_size)]
        dist.all_gather(of_all, torch.tensor(least), group=self._streams)
        check_lengths([int(one) for one in of_all], " or more")


def check_lengths(lengths: Sequence[int], others: str = "") -> None:
    """Refuse an epoch that is longer for one process than for another: they would wait for each other for ever.

    A length is -1 where a process cannot know it.
    """
    most, least = max(lengths), min(lengths)
    if most != least and least >= 0:
        raise ConfigurationError(
            f"process {lengths.index(least)} has {least} batches an epoch, "
            f"process {lengths.index(most)} has {most}{others}: give each process as many, as a DistributedSampler "
            f"does, or cut all with --trainer.limit_train_batches={least}"
        )


def check_orders(orders: Sequence[int], dealt: bool) -> None:
    """Refuse orders of samples that differ, where these are dealt; else warn of them. 0 is none."""
    if len({order for order in orders if order}) < 2:
        return
    said = (
        "the sampler of the training data has drawn another order in each process, which takes its part of its own: "
        "some samples come twice, others never; seed it alike in all, or leave out a generator of its own"
    )
    if dealt:
        raise ConfigurationError(said)
    rank_zero_warn(said)


def _order(loader: Any) -> int:
    """The same for the same order of a sampler of the user's own, of which each process takes its part; else 0."""
    found = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    wrapper = next((one for one in found if isinstance(one, DistributedSamplerWrapper)), None)
    if wrapper is None or not getattr(loader, "loads", True):  # Of a pipeline's ranks some draw none.
        return 0
    drawn: Any = wrapper.dataset
    return zlib.crc32(repr([drawn[place] for place in range(min(DRAWN, len(drawn)))]).encode())


def _fingerprint(batch: Any) -> int:
    """The same for the same samples, and hardly for others; 0 where a pipeline has them elsewhere."""
    mark = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and not leaf.is_sparse:
            try:
                some = leaf.detach().flatten()[:BYTES].cpu().contiguous()
            except ConfigurationError:
                return 0
            mark = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), mark)
    return mark
