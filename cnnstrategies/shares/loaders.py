"""Users' own DataLoaders: the items that their samplers yield, and loaders whose batches are divided by shares."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.seeds import mixed_seed, restores_random_numbers, seed_all
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.samplers import DealtBatches, EquallyAccumulated


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
        history: The ranks' shares.
    """

    def __init__(self, batches: BatchSampler, trainer: Trainer, history: ShareHistory) -> None:
        # The caller has checked that the sampler is a distributed sampler, so mypy's error is ignored.
        self.sampler: DistributedSampler[Any] = batches.sampler  # type: ignore[assignment]
        ranks, rank, size = self.sampler.num_replicas, self.sampler.rank, samples_in(self.sampler)
        accumulated = trainer.accumulate_grad_batches
        samples = batches.batch_size * ranks * accumulated
        super().__init__(size, samples, 0, ranks, rank, batches.drop_last, accumulated, history)
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


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that were used to build a loader, except the dataset and the samplers."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "persistent_workers"]
    if loader.num_workers:
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}


def items_of(sampler: Any, epoch: int) -> list[Any]:
    """Return all items that a sampler yields on all ranks in an epoch, without repeated samples.

    An item is an object that the sampler yields, for example the indices of a batch. The result begins with the first
    item of each rank, followed by the second item of each rank, and so on. All workers of a parameter server call this
    function and must get the same items, so the function seeds the random generators. At the end it restores the
    generators' states.
    """
    inner = getattr(sampler, "sampler", sampler)
    inner.set_epoch(epoch)
    settings = {name: vars(inner)[name] for name in ("rank", "num_replicas", "num_samples", "total_size")}
    is_dealt = isinstance(inner, DealtBatches)
    items: list[list[Any]] = []
    if not is_dealt:
        # Configure the sampler for a single rank, because it then yields all samples once.
        inner.num_replicas, inner.num_samples = 1, samples_in(inner)
        inner.total_size = inner.num_samples
    with restores_random_numbers():
        for rank in range(inner.num_replicas):
            inner.rank = rank
            seed_all(mixed_seed(inner.seed, epoch))
            items.append(list(sampler))
    vars(inner).update(settings)
    # If a rank has no samples in a batch, its item is a sample that another rank also has. Such an item is left out.
    places = [(rank, batch) for batch in range(len(items[0])) for rank in range(len(items))]
    return [items[rank][batch] for rank, batch in places if not is_dealt or inner.counts(batch)[rank]]


def samples_in(sampler: DistributedSampler[Any]) -> int:
    """Return the number of distinct samples in an epoch over all ranks."""
    return min(sampler.total_size, len(sampler.dataset))  # type: ignore[arg-type]
