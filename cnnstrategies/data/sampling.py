"""Which rank sees which samples, in which batch."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import DistributedSampler, SequentialSampler

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.seeds import mixed_seed


class BatchRequest(NamedTuple):
    """One batch for one rank: which samples, and the seed of its random augmentations."""

    indices: list[int]
    seed: int


class ShuffledBatches(DistributedSampler[BatchRequest]):
    """Training batches: one permutation of the dataset per epoch, the same on every rank, cut into global batches.

    Global batch k holds samples ``k * batch_size * num_replicas`` and following of the permutation, and each rank
    takes every ``num_replicas``-th of them. So the union over the ranks is the batch that one process with
    ``batch_size * num_replicas`` would see, and every rank has the same number of batches. A last, partial global
    batch is shared out evenly; only if it has fewer samples than there are ranks are some of them repeated.

    It subclasses ``DistributedSampler`` so that Lightning leaves it in place and calls :meth:`set_epoch`.

    Args:
        seed: The permutation depends on ``(seed, epoch)`` only.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        num_replicas: int,
        rank: int,
        drop_last: bool,
    ) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.size = size
        self.samples_per_batch = batch_size * num_replicas
        self.skip = 0
        if len(self) == 0:
            raise ConfigurationError(
                f"{size} training samples do not fill one global batch of {batch_size} x {num_replicas} processes: "
                "lower the batch size or set drop_last to false"
            )

    def identity(self) -> dict[str, int]:
        """What the batches depend on besides the epoch; with another of these, a batch's number means other samples."""
        return {"samples": self.size, "samples_per_batch": self.samples_per_batch, "seed": self.seed}

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        whole, rest = divmod(self.size, self.samples_per_batch)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[BatchRequest]:
        """The epoch's batches from number ``skip`` on."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        permutation = torch.randperm(self.size, generator=generator).tolist()
        for batch in range(self.skip, len(self)):
            shared = permutation[batch * self.samples_per_batch : (batch + 1) * self.samples_per_batch]
            while len(shared) < self.num_replicas:
                shared = shared + shared[: self.num_replicas - len(shared)]
            seed = mixed_seed(self.seed, self.epoch, batch, self.rank)
            yield BatchRequest(shared[self.rank :: self.num_replicas], seed)


class OrderedBatches(DistributedSampler[BatchRequest], SequentialSampler):
    """Evaluation batches: every sample exactly once over all ranks, and the same number of batches on each.

    Lightning's own sampler repeats samples to make the ranks even, which counts them twice in metrics. Here the
    sizes of the batches differ by one at most instead. The number of batches is the same because DDP's forward
    broadcasts buffers, a collective. Rank r takes a contiguous part of the dataset, in order.

    It subclasses ``DistributedSampler`` so that Lightning leaves it in place, and ``SequentialSampler`` so that it
    does so under ``overfit_batches`` too.

    Args:
        batch_size: Samples per batch and rank; some batches have one more where the ranks cannot be even otherwise.
    """

    def __init__(self, size: int, batch_size: int, num_replicas: int, rank: int) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        if size < num_replicas:
            raise ConfigurationError(
                f"{size} samples cannot be evaluated by {num_replicas} processes: each needs at least one; use fewer "
                "devices or more data"
            )
        self.size = size
        smallest, largest = size // num_replicas, -(-size // num_replicas)
        self.batches = min(-(-largest // batch_size), smallest)

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self.batches

    def __iter__(self) -> Iterator[BatchRequest]:  # type: ignore[override]
        """This rank's batches, in the order of the dataset."""
        for batch in range(self.batches):
            yield BatchRequest(self.samples(batch, self.rank), seed=batch)

    def samples(self, batch: int, rank: int) -> list[int]:
        """The samples of a rank's batch."""
        first, last = (self.size * r // self.num_replicas for r in (rank, rank + 1))
        count = last - first
        return list(range(*(first + count * b // self.batches for b in (batch, batch + 1))))
