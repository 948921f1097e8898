"""Division by shares for a user's own DataLoader, which does not come from this package's data modules."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies.data.sampling import EquallyAccumulated, batches_of, items_of, options_of, samples_in
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.streams import StreamLoader


class OrderBatches(EquallyAccumulated):
    """Batch sampler that takes the order of the samples from a distributed sampler, and divides batches by shares.

    A distributed sampler repeats some samples, so that all ranks get the same number of samples. This class leaves the
    repetitions out, so each sample occurs once in an epoch. Lightning sets the epoch's number only on the distributed
    sampler, so this class reads the number from the distributed sampler. A run that is resumed within an epoch
    continues with the next batch.

    In a step with accumulated batches, every batch counts equally, as on one device.

    Attributes:
        sampler: The distributed sampler that gives the order.

    Args:
        batches: Batch sampler of the user's loader. Lightning has replaced the sampler in it by a distributed sampler.
        trainer: The trainer that trains with the loader.
        deals: The ranks' shares.
    """

    def __init__(self, batches: BatchSampler, trainer: Trainer, deals: Deals) -> None:
        # The caller has checked that the sampler is a distributed sampler, so mypy's error is ignored.
        self.sampler: DistributedSampler[Any] = batches.sampler  # type: ignore[assignment]
        ranks, rank, size = self.sampler.num_replicas, self.sampler.rank, samples_in(self.sampler)
        accumulated = trainer.accumulate_grad_batches
        samples = batches.batch_size * ranks * accumulated
        super().__init__(size, samples, 0, ranks, rank, batches.drop_last, accumulated, deals)
        self.batch_size = batches.batch_size
        self._trainer = trainer
        self._progress = trainer.fit_loop.epoch_loop.batch_progress

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of this rank in the epoch that Lightning has set on the distributed sampler."""
        if isinstance(self._trainer.train_dataloader, list | tuple | dict):
            raise ConfigurationError(
                "training has several loaders (CombinedLoader), but only the batches of a single loader can be divided "
                "by shares: use one loader for the samples of all datasets, or a strategy without shares, such as ddp"
            )
        self.epoch, self.skip = self.sampler.epoch, self._progress.current.ready
        yield from self.rank_batches(items_of(self.sampler, self.epoch), self.skip)


class OrderLoader(DataLoader[Any]):
    """A DataLoader that starts to load only when the first batch is requested.

    Before this request, a run that is resumed within an epoch does not know the number of the next batch.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of this rank in an epoch. Loading starts when the caller requests the first batch."""
        yield from super().__iter__()


def by_shares(loader: Any, trainer: Trainer, deals: Deals) -> Any:
    """Replace a training loader by a loader whose batches are divided by shares, and return the new loader.

    The loader must be a torch DataLoader with a plain BatchSampler, and Lightning must have replaced the sampler inside
    the BatchSampler by a DistributedSampler. Any other training loader is returned unchanged, with a warning if there
    are several ranks. Loaders for evaluation, and loaders that divide their batches by shares already, are returned
    unchanged without a warning.

    Args:
        loader: The loader.
        trainer: The trainer that uses the loader.
        deals: The ranks' shares.
    """
    if not trainer.training or batches_of(loader) is not None:
        return loader
    if isinstance(loader, StreamLoader):
        if len(set(deals.shares)) > 1:
            rank_zero_warn(
                f"shares are ignored for the stream {type(loader.dataset).__name__}, because its length is not known: "
                "all ranks load batches of the loader's size; for shares use a data set with indices"
            )
        return loader
    batches = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or type(batches) is not BatchSampler
        or not isinstance(batches.sampler, DistributedSampler)
    ):
        if len(deals.shares) > 1:
            rank_zero_warn(
                f"shares are ignored for the loader {type(loader).__name__}, which chooses its batches itself: all "
                "ranks load batches of the loader's size, and all batches count equally; for shares use a DataLoader "
                "with a batch_size, and leave use_distributed_sampler true"
            )
        return loader
    order = OrderBatches(batches, trainer, deals)
    return OrderLoader(loader.dataset, batch_sampler=order, **options_of(loader))
