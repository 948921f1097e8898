"""A user's own loader, whose batches are dealt by shares."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies.data.sampling import DealtBatches, batches_of, items_of, options_of, samples_in
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares import Deals


class OrderBatches(DealtBatches):
    """Of the order that a loader's own distributed sampler has.

    Each sample comes once, where that sampler repeats some so that all ranks have as many. Lightning sets the epoch of
    ``sampler``, and of a run that goes on within an epoch counts its batches on: so do these.

    Args:
        batches: A rank's, as Lightning has put them in place.
    """

    def __init__(self, batches: BatchSampler, trainer: Trainer, deals: Deals) -> None:
        self.sampler: DistributedSampler[Any] = batches.sampler  # type: ignore[assignment]  # the caller has seen it
        ranks, rank, size = self.sampler.num_replicas, self.sampler.rank, samples_in(self.sampler)
        accumulated = trainer.accumulate_grad_batches
        samples = batches.batch_size * ranks * accumulated
        super().__init__(size, samples, 0, ranks, rank, batches.drop_last, accumulated, deals)
        self.batch_size = batches.batch_size
        self._trainer = trainer
        self._progress = trainer.fit_loop.epoch_loop.batch_progress

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches."""
        if isinstance(self._trainer.train_dataloader, list | tuple | dict):
            raise ConfigurationError(
                "training has several loaders (CombinedLoader): shares deal the batches of one; use one loader whose "
                "dataset gives the samples of all, or a strategy without shares, such as ddp"
            )
        self.epoch, self.skip = self.sampler.epoch, self._progress.current.ready
        yield from self.rank_batches(items_of(self.sampler, self.epoch), self.skip)


class OrderLoader(DataLoader[Any]):
    """Loads nothing before the first batch is asked for: not before it is known which one that is."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of an epoch."""
        yield from super().__iter__()


def by_shares(loader: Any, trainer: Trainer, deals: Deals) -> Any:
    """A loader of training whose batches are dealt by shares; the same one, with a warning, where it cannot be."""
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
                f"shares: {type(loader).__name__} has an order of its own, so all ranks have batches of its own size, "
                "which count alike: shares are for loaders with a batch_size and a sampler that Lightning may "
                "distribute"
            )
        return loader
    order = OrderBatches(batches, trainer, deals)
    return OrderLoader(loader.dataset, batch_sampler=order, **options_of(loader))
