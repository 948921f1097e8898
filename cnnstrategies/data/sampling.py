"""Which rank sees which samples, in which batch."""

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
    """Training batches: one order of the dataset per epoch, the same on every rank, cut into global batches.

    A step's samples are the next ones of the order, those that one process would see. Where gradients are accumulated
    they are cut into as many global batches, whose sizes differ by one at most; of each every rank gets its share.
    Every rank has the same number of batches; where one has no sample in the last of them, it repeats one of another's,
    which is to count nothing (:meth:`weight`).

    It subclasses ``DistributedSampler`` so that Lightning leaves it in place and calls :meth:`set_epoch`.

    Attributes:
        drawn: Batches of the epoch that were drawn; a loader's workers are ahead of the training.
        skip: Batches that are left out at the begin.

    Args:
        samples: Of an optimizer step over all ranks.
        accumulated: Batches whose gradients make a step.
        deals: The ranks' shares; by default equal ones.
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
        """Samples of each rank in a batch."""
        start, stop = self._bounds(batch)
        return self.deals.counts(self.epoch, batch, stop - start)

    def step_of(self, batch: int) -> range:
        """The batches of the step to which a batch belongs."""
        first = batch // len(self._parts) * len(self._parts)
        return range(first, min(first + len(self._parts), len(self)))

    def weight(self, batch: int, batches: float, weighting: GradientWeighting) -> float:
        """What this rank's mean loss of a batch is to be multiplied by.

        Then the mean over ranks, and over accumulated batches, is the mean over the samples of the step.

        Args:
            batches: Of an epoch, which ends a step wherever it is.
            weighting: How the strategy combines the gradients of ranks.
        """
        counts = self.counts(batch)
        step = [self.counts(one) for one in self.step_of(batch) if one < batches]
        if weighting == "by_rank":
            own = sum(of_ranks[self.rank] for of_ranks in step)
            return counts[self.rank] * self.accumulated / own if own else 1.0
        part = sum(counts) if weighting == "by_sample" else counts[self.rank] * self.num_replicas
        return part * self.accumulated / sum(map(sum, step))

    def own(self, order: Sequence[int], first: int = 0) -> Iterator[list[int]]:
        """This rank's samples in each batch of an epoch, whose samples come in such an order."""
        for batch in range(first, len(self)):
            self.drawn = batch + 1
            start, stop = self._bounds(batch)
            places = turns(self.counts(batch))[self.rank] or [self.rank % (stop - start)]
            yield [order[start + place] for place in places]


class ShuffledBatches(DealtBatches):
    """Of a permutation that is a new one in each epoch.

    Args:
        seed: The permutation depends on ``(seed, epoch)`` only.
    """

    def identity(self) -> dict[str, int]:
        """What the batches depend on besides the epoch; with another of these, a batch's number means other samples."""
        step = {"samples_of_a_step": self.samples, "accumulated": self.accumulated}
        return {"samples": self.size, **step, "seed": self.seed}

    def __iter__(self) -> Iterator[BatchRequest]:
        """The epoch's batches from number ``skip`` on."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        permutation = torch.randperm(self.size, generator=generator).tolist()
        for batch, indices in enumerate(self.own(permutation, self.skip), self.skip):
            yield BatchRequest(indices, mixed_seed(self.seed, self.epoch, batch, self.rank))


def dealt(trainer: Any) -> DealtBatches | None:
    """What deals a trainer's training batches to its processes, if it does so by shares."""
    return batches_of(trainer.train_dataloader)


def batches_of(loader: Any) -> DealtBatches | None:
    """What deals a loader's batches by shares."""
    found = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return next((one for one in found if isinstance(one, DealtBatches)), None)


class OrderedBatches(DistributedSampler[BatchRequest], SequentialSampler):
    """Evaluation batches: every sample exactly once over all ranks, and the same number of batches on each.

    Lightning's own sampler repeats samples to make the ranks even, which counts them twice in metrics. Here the
    sizes of the batches differ by one at most instead, or as the ranks' shares do. The number of batches is the same
    because DDP's forward broadcasts buffers, a collective. Rank r takes a contiguous part of the dataset, in order.

    It subclasses ``DistributedSampler`` so that Lightning leaves it in place, and ``SequentialSampler`` so that it
    does so under ``overfit_batches`` too.

    Args:
        batch_size: Samples per batch and rank with equal shares; some batches have one more where the ranks cannot be
            even otherwise.
        deals: The ranks' shares; by default equal ones.
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
        """This rank's batches, in the order of the dataset."""
        for batch in range(self.batches):
            yield BatchRequest(self.samples(batch, self.rank), seed=batch)

    def samples(self, batch: int, rank: int) -> list[int]:
        """The samples of a rank's batch."""
        counts = deal(self.size, self.deals.loads(self.deals.shares), least=self.batches)
        first, count = sum(counts[:rank]), counts[rank]
        return list(range(*(first + count * b // self.batches for b in (batch, batch + 1))))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What another loader of the same samples is made with, but for which of them make a batch."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "persistent_workers"]
    if loader.num_workers:
        names.append("prefetch_factor")
    return {name: getattr(loader, name) for name in names}


def items_of(sampler: Any, epoch: int) -> list[Any]:
    """All items of an epoch, those of all ranks in turn; each sample once.

    What is drawn at random is drawn anew in each worker: all begin with the same numbers.
    """
    inner = getattr(sampler, "sampler", sampler)
    inner.set_epoch(epoch)
    own = {name: vars(inner)[name] for name in ("rank", "num_replicas", "num_samples", "total_size")}
    deals, shares = isinstance(inner, DealtBatches), []
    if not deals:
        # One draw has all, and none of those that are repeated so that all ranks have as many.
        inner.num_replicas, inner.num_samples = 1, samples_in(inner)
        inner.total_size = inner.num_samples
    with isolate_rng(include_cuda=False):
        for rank in range(inner.num_replicas):
            inner.rank = rank
            seed_all(mixed_seed(inner.seed, epoch))
            shares.append(list(sampler))
    vars(inner).update(own)
    # A rank that has no sample of a dealt batch repeats another's.
    all_ = [(rank, place) for place in range(len(shares[0])) for rank in range(len(shares))]
    return [shares[rank][place] for rank, place in all_ if not deals or inner.counts(place)[rank]]


def samples_in(sampler: DistributedSampler[Any]) -> int:
    """Of an epoch, over all ranks, each once."""
    return min(sampler.total_size, len(sampler.dataset))  # type: ignore[arg-type]


def seed_all(seed: int) -> None:
    """Of torch on the CPU, NumPy and Python."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would change that of accelerators, too.
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
