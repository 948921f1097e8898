"""Division of whole batches among the ranks, for batch samplers into which Lightning cannot put a sampler."""

import copy
import inspect
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import sized_len
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from cnnstrategies.runtime.seeds import mixed_seed, restores_random_numbers, seed_all


class DividedBatches(DistributedSampler[Any]):
    """Batch sampler that gives the ranks the batches of a user's batch sampler in turn.

    The user's batch sampler decides which samples form a batch. All ranks draw the batches of an epoch with equal
    random seeds, and rank r of R ranks takes the batches r, r + R, r + 2 R and so on. If the number of batches is not a
    multiple of R, the first batches are repeated, as Lightning's own sampler repeats samples. The batch sampler may be
    endless.

    Args:
        batches: The user's batch sampler.
        num_replicas: Number of ranks.
        rank: Index of this rank.
    """

    def __init__(self, batches: Any, num_replicas: int, rank: int) -> None:
        self.count = sized_len(batches)
        seed = int(os.getenv("PL_GLOBAL_SEED", "0"))
        dataset: Any = range(self.count or 0)
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)
        self.batches = batches
        for name in ("batch_size", "drop_last"):
            if hasattr(batches, name):
                setattr(self, name, getattr(batches, name))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch's number here, and on the user's batch sampler if it has this method."""
        super().set_epoch(epoch)
        if hasattr(self.batches, "set_epoch"):
            self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch.

        Raises:
            TypeError: The user's batch sampler has no length.
        """
        if self.count is None:
            raise TypeError(f"{type(self.batches).__name__} has no length")
        return -(-self.count // self.num_replicas)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the epoch that was set last."""
        with restores_random_numbers():
            seed_all(mixed_seed(self.seed, self.epoch))
            # Drawing a batch of a finite sampler may use random numbers, so all batches are drawn at once. On one
            # device Lightning loads no more batches than the sampler's length, even if the sampler yields more.
            drawn = iter(self.batches if self.count is None else list(islice(self.batches, self.count)))
        first: list[Any] = []
        number = 0
        for number, batch in enumerate(drawn, 1):
            if len(first) < self.num_replicas:
                first.append(batch)
            if (number - 1) % self.num_replicas == self.rank:
                yield batch
        if first and 0 < number % self.num_replicas <= self.rank:
            yield first[(self.rank - number % self.num_replicas) % len(first)]


def takes_sampler(batches: Any) -> bool:
    """Whether Lightning can build a batch sampler again with a distributed sampler inside.

    Lightning passes the sampler to the constructor, and takes the other arguments from a record that it has made of the
    constructor's call. A class whose constructor does not take a sampler chooses its batches itself.
    """
    if not isinstance(batches, BatchSampler) or not isinstance(getattr(batches, "sampler", None), Sampler):
        return False
    return "sampler" in inspect.signature(type(batches).__init__).parameters


def with_divided_batches(loader: DataLoader[Any], num_replicas: int, rank: int) -> DataLoader[Any]:
    """Return a copy of a loader whose batches are divided among the ranks; the loader itself is not changed.

    Args:
        loader: A loader with a batch sampler.
        num_replicas: Number of ranks.
        rank: Index of this rank.
    """
    divided = copy.copy(loader)
    batches = DividedBatches(loader.batch_sampler, num_replicas, rank)
    # torch does not allow to set these attributes of a loader. Lightning asks the attribute `sampler` whether the data
    # are divided already.
    vars(divided).update({"batch_sampler": batches, "sampler": batches})
    return divided
