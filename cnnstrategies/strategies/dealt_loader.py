"""A user's own loader, whose batches are dealt by shares."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies.data.sampling import DealtBatches
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.parameter_server.loader import items_of, options_of


class OrderBatches(DealtBatches):
    """Of the order that a loader's own distributed sampler has.

    Each sample comes once, where that sampler repeats some so that all ranks have as many. Lightning sets the epoch of
    ``sampler``.

    Args:
        batches: A rank's, as Lightning has put them in place.
    """

    def __init__(self, batches: BatchSampler, accumulated: int, deals: Deals) -> None:
        self.sampler: DistributedSampler[Any] = batches.sampler  # type: ignore[assignment]  # the caller has seen it
        ranks = self.sampler.num_replicas
        size = len(self.sampler.dataset)  # type: ignore[arg-type]
        samples = batches.batch_size * ranks * accumulated
        super().__init__(size, samples, 0, ranks, self.sampler.rank, batches.drop_last, accumulated, deals)
        self.batch_size = batches.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's batches."""
        self.epoch = self.sampler.epoch
        yield from self.own(items_of(self.sampler, self.epoch)[: self.size])


def with_batches(loader: DataLoader[Any], batches: DealtBatches) -> DataLoader[Any]:
    """A loader of the same samples in other batches."""
    return DataLoader(loader.dataset, batch_sampler=batches, **options_of(loader))
