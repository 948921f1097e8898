"""A user's own loader with batches that are divided by shares."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies.data.sampling import DealtBatches, batches_of, items_of, options_of, samples_in
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares import Deals


class OrderBatches(DealtBatches):
    """Training batches in the order of a loader's own distributed sampler.

    Each sample occurs once in an epoch, although that sampler repeats samples to give all ranks equally many. As
    Lightning does, these batches take the epoch from ``sampler``, and a run that is resumed within an epoch goes on
    with the next batch.

    Attributes:
        sampler: The loader's distributed sampler.

    Args:
        batches: The loader's batch sampler, with the distributed sampler that Lightning has put into it.
        trainer: The trainer that trains with the loader.
        deals: The ranks' shares.
    """

    def __init__(self, batches: BatchSampler, trainer: Trainer, deals: Deals) -> None:
        self.sampler: DistributedSampler[Any] = batches.sampler  # type: ignore[assignment]  # checked by the caller
        ranks, rank, size = self.sampler.num_replicas, self.sampler.rank, samples_in(self.sampler)
        accumulated = trainer.accumulate_grad_batches
        samples = batches.batch_size * ranks * accumulated
        super().__init__(size, samples, 0, ranks, rank, batches.drop_last, accumulated, deals)
        self.batch_size = batches.batch_size
        self._trainer = trainer
        self._progress = trainer.fit_loop.epoch_loop.batch_progress

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of an epoch."""
        if isinstance(self._trainer.train_dataloader, list | tuple | dict):
            raise ConfigurationError(
                "training has several loaders (CombinedLoader), and shares divide the batches of one: use one loader "
                "whose dataset has the samples of all, or a strategy without shares, such as ddp"
            )
        self.epoch, self.skip = self.sampler.epoch, self._progress.current.ready
        yield from self.rank_batches(items_of(self.sampler, self.epoch), self.skip)


class OrderLoader(DataLoader[Any]):
    """A loader that loads nothing until the first batch is requested: only then its number in the epoch is known."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of an epoch."""
        yield from super().__iter__()


def by_shares(loader: Any, trainer: Trainer, deals: Deals) -> Any:
    """Return a training loader whose batches are divided by shares.

    A loader of any other kind than torch's own, with a sampler that Lightning distributes, is returned unchanged; if
    there are several ranks, a warning says so.
    """
    if not trainer.training or batches_of(loader) is not None:
        return loader
    batches = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or type(batches) is not BatchSampler
        or not isinstance(batches.sampler, DistributedSampler)
    ):
        if len(deals.shares) > 1:
            rank_zero_warn(
                f"shares are ignored for {type(loader).__name__}, which chooses its batches itself: all ranks load "
                "batches of its size, which count equally; use a DataLoader with a batch_size and a sampler that "
                "Lightning may distribute"
            )
        return loader
    order = OrderBatches(batches, trainer, deals)
    return OrderLoader(loader.dataset, batch_sampler=order, **options_of(loader))
