"""Samplers that decide which rank sees which samples, in which batch."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.seeds import mixed_seed
from cnnstrategies.shares import Deals, deal, turns
from cnnstrategies.strategies.protocol import GradientWeighting


class BatchRequest(NamedTuple):
    """One batch for one rank: which samples, and the seed of its random augmentations."""

    indices: list[int]
    seed: int


class DealtBatches(DistributedSampler[Any]):
    """Training batches: one order of the dataset per epoch, equal on all ranks, cut into global batches.

    Each optimizer step takes the next samples of the order, as one process would. With accumulated gradients the
    samples of a step are cut into one global batch for each accumulated batch; the sizes of these global batches
    differ by at most one. Every rank gets its share of each global batch, and all ranks have the same number of
    batches. If the last global batch is too small for a rank, that rank repeats a sample of another rank, and
    :meth:`weight` gives the repeated sample no weight.

    The class derives from ``DistributedSampler`` so that Lightning keeps the sampler and calls :meth:`set_epoch`.

    Attributes:
        drawn: Number of batches of the epoch that were drawn. A loader's workers draw ahead of the training.
        skip: Number of batches to leave out at the beginning of an epoch.

    Args:
        size: Samples in the dataset.
        samples: Samples of an optimizer step over all ranks.
        seed: Seed of the order.
        num_replicas: Number of ranks.
        rank: Index of this rank.
        drop_last: Whether to leave out a last, partial global batch.
        accumulated: Number of batches whose gradients make a step.
        deals: Shares of the ranks; equal shares by default.

    Raises:
        ConfigurationError: The dataset is smaller than one global batch, and ``drop_last`` is set.
    """

    skip = 0

    def __init__(
        self,
        size: int,
        samples: int,
        seed: int,
        num_replicas: int,
        rank: int,
        drop_last: bool,
        accumulated: int = 1,
        deals: Deals | None = None,
    ) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.size = size
        self.samples = samples
        self.accumulated = accumulated
        self.deals = Deals([1] * num_replicas) if deals is None else deals
        self.drawn = 0
        self._parts = deal(samples, [1] * accumulated)
        self._starts = [0, *accumulate(self._parts)]
        if len(self) == 0:
            raise ConfigurationError(
                f"{size} training samples do not fill one global batch of {self._parts[0]}: lower the batch size or "
                "set drop_last to false"
            )

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        whole, rest = divmod(self.size, self.samples)
        if self.drop_last:
            more = sum(stop <= rest for stop in self._starts[1:])
        else:
            more = sum(start < rest for start in self._starts[:-1])
        return whole * len(self._parts) + more

    def _bounds(self, batch: int) -> tuple[int, int]:
        step, part = divmod(batch, len(self._parts))
        first = step * self.samples
        return first + self._starts[part], min(first + self._starts[part + 1], self.size)

    def counts(self, batch: int) -> tuple[int, ...]:
        """Return the number of samples of each rank in a batch."""
        start, stop = self._bounds(batch)
        return self.deals.counts(self.epoch, batch, stop - start)

    def step_of(self, batch: int) -> range:
        """Return the numbers of the batches that belong to the same step as a batch."""
        first = batch // len(self._parts) * len(self._parts)
        return range(first, min(first + len(self._parts), len(self)))

    def weight(self, batch: int, batches: float, weighting: GradientWeighting) -> float:
        """Return the factor for this rank's mean loss of a batch.

        With this factor the mean over ranks and over accumulated batches is the mean over the samples of the step.

        Args:
            batch: Number of the batch in its epoch.
            batches: Number of batches of an epoch. The end of an epoch also ends a step.
            weighting: How the strategy combines the gradients of the ranks.
        """
        counts = self.counts(batch)
        step_counts = [self.counts(other) for other in self.step_of(batch) if other < batches]
        if weighting == "by_rank":
            rank_samples = sum(rank_counts[self.rank] for rank_counts in step_counts)
            return counts[self.rank] * self.accumulated / rank_samples if rank_samples else 1.0
        part = sum(counts) if weighting == "by_sample" else counts[self.rank] * self.num_replicas
        return part * self.accumulated / sum(map(sum, step_counts))

    def rank_batches(self, order: Sequence[int], first: int = 0) -> Iterator[list[int]]:
        """Yield this rank's samples of each batch, from batch `first` on, for an epoch with the given order."""
        for batch in range(first, len(self)):
            self.drawn = batch + 1
            start, stop = self._bounds(batch)
            places = turns(self.counts(batch))[self.rank] or [self.rank % (stop - start)]
            yield [order[start + place] for place in places]


class ShuffledBatches(DealtBatches):
    """The ranks' parts of one permutation, redrawn each epoch.

    Args:
        seed: Seed of the permutations. A permutation depends on ``(seed, epoch)`` only.
    """

    def identity(self) -> dict[str, int]:
        """Return the numbers that, besides the epoch, determine the batches.

        If one of these numbers changes, the same batch number stands for other samples.
        """
        step = {"samples_of_a_step": self.samples, "accumulated": self.accumulated}
        return {"samples": self.size, **step, "seed": self.seed}

    def __iter__(self) -> Iterator[BatchRequest]:
        """Yield the epoch's batches from number ``skip`` on."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        permutation = torch.randperm(self.size, generator=generator).tolist()
        for batch, indices in enumerate(self.rank_batches(permutation, self.skip), self.skip):
            yield BatchRequest(indices, mixed_seed(self.seed, self.epoch, batch, self.rank))


def dealt(trainer: Any) -> DealtBatches | None:
    """Return the sampler that divides a trainer's training batches by shares, or None if the loader has another one."""
    return batches_of(trainer.train_dataloader)


def batches_of(loader: Any) -> DealtBatches | None:
    """Return the sampler that divides a loader's batches by shares, or None if the loader has another one."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return next((sampler for sampler in samplers if isinstance(sampler, DealtBatches)), None)


class OrderedBatches(DistributedSampler[BatchRequest], SequentialSampler):
    """Evaluation batches: every sample exactly once over all ranks, and the same number of batches on each rank.

    Lightning's own sampler repeats samples so that all ranks have equally many, and metrics then count the repeated
    samples twice. This sampler lets the sizes of the batches differ instead: by at most one, or in proportion to the
    ranks' shares. All ranks have the same number of batches because DDP's forward broadcasts buffers, which is a
    collective. Each rank takes a contiguous part of the dataset, in order.

    The class derives from ``DistributedSampler`` so that Lightning keeps the sampler, and from ``SequentialSampler``
    so that Lightning also keeps it under ``overfit_batches``.

    Args:
        size: Samples in the dataset.
        batch_size: Samples per batch and rank, for equal shares. Some batches have one sample more if the dataset
            cannot be divided evenly.
        num_replicas: Number of ranks.
        rank: Index of this rank.
        deals: Shares of the ranks; equal shares by default.

    Raises:
        ConfigurationError: There are fewer samples than ranks.
    """

    def __init__(self, size: int, batch_size: int, num_replicas: int, rank: int, deals: Deals | None = None) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        if size < num_replicas:
            raise ConfigurationError(
                f"{size} samples cannot be evaluated by {num_replicas} processes: each needs at least one; use fewer "
                "devices or more data"
            )
        self.size = size
        self.deals = Deals([1] * num_replicas) if deals is None else deals
        smallest, largest = size // num_replicas, -(-size // num_replicas)
        self.batches = min(-(-largest // batch_size), smallest)

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self.batches

    def __iter__(self) -> Iterator[BatchRequest]:  # type: ignore[override]
        """Yield this rank's batches, in the order of the dataset."""
        for batch in range(self.batches):
            yield BatchRequest(self.samples(batch, self.rank), seed=batch)

    def samples(self, batch: int, rank: int) -> list[int]:
        """Return the samples of a rank's batch."""
        counts = deal(self.size, self.deals.loads(self.deals.shares), least=self.batches)
        first, count = sum(counts[:rank]), counts[rank]
        return list(range(*(first + count * b // self.batches for b in (batch, batch + 1))))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments for another loader like this one, except the dataset and the samplers."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "persistent_workers"]
    if loader.num_workers:
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}


def items_of(sampler: Any, epoch: int) -> list[Any]:
    """Return all items that a sampler yields in an epoch, of all ranks in turn, each sample once.

    Every worker calls this function and must get the same items, so the random generators are seeded first and restored
    afterwards.
    """
    inner = getattr(sampler, "sampler", sampler)
    inner.set_epoch(epoch)
    settings = {name: vars(inner)[name] for name in ("rank", "num_replicas", "num_samples", "total_size")}
    deals, shares = isinstance(inner, DealtBatches), []
    if not deals:
        # As a single rank, the sampler yields all samples and repeats none.
        inner.num_replicas, inner.num_samples = 1, samples_in(inner)
        inner.total_size = inner.num_samples
    with isolate_rng(include_cuda=False):
        for rank in range(inner.num_replicas):
            inner.rank = rank
            seed_all(mixed_seed(inner.seed, epoch))
            shares.append(list(sampler))
    vars(inner).update(settings)
    # A rank without a sample in a batch repeats a sample of another rank: the repeated sample is left out.
    places = [(rank, batch) for batch in range(len(shares[0])) for rank in range(len(shares))]
    return [shares[rank][batch] for rank, batch in places if not deals or inner.counts(batch)[rank]]


def samples_in(sampler: DistributedSampler[Any]) -> int:
    """Return the number of different samples of an epoch, over all ranks."""
    return min(sampler.total_size, len(sampler.dataset))  # type: ignore[arg-type]


def seed_all(seed: int) -> None:
    """Seed the random generators of torch on the CPU, NumPy and Python."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would also seed the accelerators' generators.
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
