"""Samplers that divide the samples of a data set among ranks and batches."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DistributedSampler, SequentialSampler

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.seeds import mixed_seed
from cnnstrategies.shares.dealing import deal, turns
from cnnstrategies.shares.history import ShareHistory

if TYPE_CHECKING:  # The strategies import this module.
    from cnnstrategies.strategies.protocol import GradientWeighting


class BatchRequest(NamedTuple):
    """Request for one batch of one rank: indices of the samples, and seed of the random augmentation."""

    indices: list[int]
    seed: int


class DealtBatches(DistributedSampler[Any]):
    """Base class of samplers that divide each global batch of training samples in proportion to the ranks' shares.

    All ranks use the same order of the samples in an epoch. Each optimizer step takes the next ``samples`` samples of
    this order, so a step has the same samples as in a run with one process. With gradient accumulation the samples of a
    step are divided into ``accumulated`` global batches, whose sizes differ by at most one. Every rank gets its share
    of each global batch, and all ranks have the same number of batches. If the last global batch has too few samples
    for all ranks, a rank without a sample repeats a sample of another rank. :meth:`weight` gives the repeated sample
    the weight 0.

    The class derives from ``DistributedSampler``, so that Lightning does not replace the sampler and calls
    :meth:`set_epoch`.

    Attributes:
        follows_shares: Whether the sampler divides batches by the shares, which may change.
        drawn: Number of batches that were drawn in this epoch. It includes prefetched batches that were not yet used
            for training.
        skip: Number of batches to skip at the beginning of an epoch.

    Args:
        size: Number of samples in the dataset.
        samples: Number of samples in an optimizer step over all ranks.
        seed: Seed of the order.
        num_replicas: Number of ranks.
        rank: Index of this rank.
        drop_last: Whether to leave out the last global batch of an epoch if it is smaller than the others.
        accumulated: Number of batches whose gradients are accumulated for a step.
        history: Shares of the ranks; equal shares by default.

    Raises:
        ConfigurationError: ``drop_last`` is set and the dataset is smaller than one global batch.
    """

    follows_shares = True
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
        history: ShareHistory | None = None,
    ) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]
        self.size = size
        self.samples = samples
        self.accumulated = accumulated
        self.history = ShareHistory([1] * num_replicas) if history is None else history
        self.drawn = 0
        self._parts = deal(samples, [1] * accumulated)
        self._starts = [0, *accumulate(self._parts)]
        if len(self) == 0:
            raise ConfigurationError(
                f"{size} training samples are less than one global batch of {self._parts[0]}: lower the batch size, or "
                "set drop_last to false"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on every rank."""
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
        """Return the number of samples that each rank has in a batch.

        Args:
            batch: Index of the batch in its epoch.
        """
        start, stop = self._bounds(batch)
        return self.history.counts(self.epoch, batch, stop - start)

    def step_of(self, batch: int) -> range:
        """Return the indices of all batches that belong to the same optimizer step as ``batch``."""
        first = batch // len(self._parts) * len(self._parts)
        return range(first, min(first + len(self._parts), len(self)))

    def _step_counts(self, batch: int, batches: float) -> list[tuple[int, ...]]:
        """Return each rank's number of samples in every batch of a batch's optimizer step."""
        return [self.counts(other) for other in self.step_of(batch) if other < batches]

    def weight(self, batch: int, batches: float, weighting: "GradientWeighting") -> float:
        """Return the factor for this rank's mean loss of a batch.

        If every rank multiplies its mean losses by these factors, the mean over the ranks and the accumulated batches
        equals the mean over all samples of the step.

        Args:
            batch: Index of the batch in its epoch.
            batches: Number of batches in an epoch. The last step of an epoch may have fewer batches than other steps.
            weighting: How the strategy weights the ranks' gradients when it combines them.
        """
        counts, step_counts = self.counts(batch), self._step_counts(batch, batches)
        if weighting == "by_rank":
            rank_samples = sum(rank_counts[self.rank] for rank_counts in step_counts)
            return counts[self.rank] * self.accumulated / rank_samples if rank_samples else 1.0
        part = sum(counts) if weighting == "by_sample" else counts[self.rank] * self.num_replicas
        return part * self.accumulated / sum(map(sum, step_counts))

    def rank_batches(self, order: Sequence[int], first: int = 0) -> Iterator[list[int]]:
        """Yield, for each batch of an epoch, the indices of this rank's samples.

        Args:
            order: Order of the samples in the epoch.
            first: Index of the first batch to yield.
        """
        for batch in range(first, len(self)):
            self.drawn = batch + 1
            start, stop = self._bounds(batch)
            places = turns(self.counts(batch))[self.rank] or [self.rank % (stop - start)]
            yield [order[start + place] for place in places]


class ShuffledBatches(DealtBatches):
    """Sampler of training batches whose order is a random permutation of the samples, drawn again for each epoch.

    Args:
        seed: Seed of the permutations. The permutation of an epoch depends only on the seed and the epoch.
    """

    def identity(self) -> dict[str, int]:
        """Return the settings that, together with the epoch, determine the samples of each global batch.

        A run can resume within an epoch only if these settings have not changed.
        """
        step = {"samples_of_a_step": self.samples, "accumulated": self.accumulated}
        return {"samples": self.size, **step, "seed": self.seed}

    def __iter__(self) -> Iterator[BatchRequest]:
        """Yield this rank's batches of the epoch, without the first ``skip`` batches."""
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        permutation = torch.randperm(self.size, generator=generator).tolist()
        for batch, indices in enumerate(self.rank_batches(permutation, self.skip), self.skip):
            yield BatchRequest(indices, mixed_seed(self.seed, self.epoch, batch, self.rank))


def dealt(trainer: Any) -> DealtBatches | None:
    """Return the sampler of a trainer's training loader. Return None if the sampler is not a :class:`DealtBatches`."""
    return batches_of(trainer.train_dataloader)


def batches_of(loader: Any) -> DealtBatches | None:
    """Return the sampler of a loader. Return None if the sampler is not a :class:`DealtBatches`."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return next((sampler for sampler in samplers if isinstance(sampler, DealtBatches)), None)


class EquallyAccumulated(DealtBatches):
    """Base class of samplers of users' own loaders: in a step with accumulated batches, every batch counts equally."""

    def weight(self, batch: int, batches: float, weighting: "GradientWeighting") -> float:
        """Return the factor for this rank's mean loss of a batch.

        The result of a step is that of one device: Lightning divides the mean loss of each accumulated batch by
        ``accumulate_grad_batches``, whatever the size of the batch, and also in a last step with fewer batches.
        For the weighting "by_rank", batches of the step that are not loaded yet count as full ones.
        """
        counts = self.counts(batch)
        if weighting == "by_sample":
            return 1.0
        part = counts[self.rank] / sum(counts)
        if weighting == "equal":
            return part * self.num_replicas
        # The strategy weights the ranks by their samples in the whole step, so this weight is divided out.
        step_counts = self._step_counts(batch, batches)
        rank_samples = sum(rank_counts[self.rank] for rank_counts in step_counts)
        return part * sum(map(sum, step_counts)) / rank_samples if rank_samples else 1.0


class OrderedBatches(DistributedSampler[BatchRequest], SequentialSampler):
    """Sampler of evaluation batches. Each sample is evaluated exactly once, by one of the ranks.

    Lightning's own sampler repeats samples until all ranks have the same number of samples, and metrics then count the
    repeated samples twice. With this sampler no sample is repeated, so the ranks' batches may have different sizes: the
    sizes differ by at most one sample, or are proportional to the ranks' shares. All ranks have the same number of
    batches, because DDP broadcasts buffers in each forward pass. Each rank evaluates a contiguous range of the dataset,
    in order.

    The class derives from ``DistributedSampler``, so that Lightning does not replace the sampler, and from
    ``SequentialSampler``, so that Lightning also does not replace the sampler when ``overfit_batches`` is set.

    Args:
        size: Number of samples in the dataset.
        batch_size: Number of samples in a batch of each rank, for equal shares. Some batches have one more sample if
            the dataset cannot be divided evenly.
        num_replicas: Number of ranks.
        rank: Index of this rank.
        history: Shares of the ranks; equal shares by default.

    Raises:
        ConfigurationError: The dataset has fewer samples than there are ranks.
    """

    def __init__(
        self, size: int, batch_size: int, num_replicas: int, rank: int, history: ShareHistory | None = None
    ) -> None:
        super().__init__(range(size), num_replicas=num_replicas, rank=rank, shuffle=False)  # type: ignore[arg-type]
        if size < num_replicas:
            raise ConfigurationError(
                f"{size} samples cannot be evaluated by {num_replicas} processes, because each process needs at least "
                "one sample: use fewer devices, or more data"
            )
        self.size = size
        self.history = ShareHistory([1] * num_replicas) if history is None else history
        smallest, largest = size // num_replicas, -(-size // num_replicas)
        self.batches = min(-(-largest // batch_size), smallest)

    def __len__(self) -> int:
        """Return the number of batches, which is the same on every rank."""
        return self.batches

    def __iter__(self) -> Iterator[BatchRequest]:  # type: ignore[override]
        """Yield this rank's batches, in the order of the dataset."""
        for batch in range(self.batches):
            yield BatchRequest(self.samples(batch, self.rank), seed=batch)

    def samples(self, batch: int, rank: int) -> list[int]:
        """Return the indices of the samples in a batch of a rank."""
        counts = deal(self.size, self.history.loads(self.history.shares), least=self.batches)
        first, count = sum(counts[:rank]), counts[rank]
        return list(range(*(first + count * b // self.batches for b in (batch, batch + 1))))
