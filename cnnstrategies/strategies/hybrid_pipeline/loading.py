"""Load global batches so that every rank gets the whole batch: small tensors as copies, large tensors at a place."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from cnnstrategies.data.division import samplers_of
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import Places
from cnnstrategies.shares.samplers import batches_of
from cnnstrategies.strategies.batch_form import sendable, take_apart
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.hybrid_pipeline.placed_batches import NoneBatch, PlacedBatches
from cnnstrategies.strategies.joined_parts import count_samples, first_rows

# Default for the largest number of bytes of a tensor of which all ranks get copies.
SMALL = 1 << 16
_numbers = itertools.count()  # Numbers of this process's loaders.


class PlacedLoader:
    """Loader that yields global batches, with the user's structure and in the same number, on every rank.

    The ranks of the first stage load parts of a batch. If the user's code has divided the data among all ranks, all
    ranks load. The samples of the global batch are in the order in which a single process would load them. All ranks
    have copies of small tensors and of values that are not tensors. Large tensors are on the ranks of the first stage,
    and on ranks that have read such a tensor of an earlier batch; see :class:`.BatchReaders`. They are foreign on all
    other ranks. If several ranks load, each of them keeps its rows of a large tensor until an operation needs all rows;
    see :mod:`cnnstrategies.placed.partial`.

    After each batch, the random generators of all ranks have the states of those of the first loading rank. Numbers
    that the loader draws in this rank's process are therefore drawn once, as on one device.

    Other attributes of a loader are those of the rank's own loader.

    Attributes:
        number: Number of the loader, which is the same on all ranks.
        length: Number of batches of every rank; None if it is not known.

    Args:
        loader: This rank's own loader.
        ranks: The ranks that load.
        places: The rules of this rank.
        placement: The numbering of the ranks.
        most: Function that returns the largest of the numbers that the ranks pass. All ranks must call this function.
        small: Largest number of bytes of a tensor of which all ranks get copies.
        predicts: Whether Lightning's prediction writers need the indices of the samples.
    """

    def __init__(
        self,
        loader: Any,
        ranks: LoadingRanks,
        places: Places,
        placement: Placement,
        most: Callable[[int], int],
        small: int = SMALL,
        predicts: bool = False,
    ) -> None:
        self.loader, self.ranks, self.places = loader, ranks, places
        self.small, self.predicts = small, predicts
        self.sources = tuple(placement.ranks(0))
        self._count = 0  # Number of samples of the last batch that this rank has loaded itself.
        try:
            length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            length = None
        self._batch_size = most(_batch_size(loader))
        longest = most(-1 if length is None else length)
        self.length = None if length is None else longest
        # The processes may have created different numbers of loaders before.
        self.number = most(next(_numbers))
        # To find out whether a loader can continue in the middle of an epoch, Lightning reads these attributes.
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        if hasattr(loader, "describe_stream"):
            self.describe_stream = self._describe_stream

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # While an instance is unpickled, it does not have this attribute yet.
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Return the number of batches of every rank."""
        if self.length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator of the global batches. All ranks must call this, and use the iterator alike."""
        return PlacedBatches(self)

    def begin(self) -> Iterator[Any]:
        """Create the iterator of this rank's own loader, and return an iterator of this rank's parts of batches.

        A part is a result of :func:`~cnnstrategies.strategies.batch_form.take_apart`, or None if this
        rank does not have a part of a batch. The iterator of parts does not end.
        """
        return self.ranks.batches(self._own(iter(self.loader)) if self.loads_now else iter(()))

    # Facts

    @property
    def loads(self) -> bool:
        """Whether this rank loads batches, as far as this is known before the first batch."""
        return bool(self.ranks.all_load) or self.ranks.in_first_stage

    @property
    def loads_now(self) -> bool:
        """Whether this rank loads, or compares its first batches with other ranks' to find out which ranks load."""
        return self.ranks.all_load is not False or self.ranks.in_first_stage

    @property
    def loading_processes(self) -> int:
        """Number of ranks that load batches, as far as this is known before the first batch."""
        return self.ranks.number

    @property
    def usual(self) -> int | None:
        """Number of samples of a first stage's replica in a batch that is not the last; None if it is not known."""
        return -(-self._batch_size * self.ranks.number // self.ranks.replicas) or None

    @property
    def knows_counts(self) -> bool:
        """Whether this rank reads the whole stream, and so knows how many samples ``drop_last`` leaves out."""
        return not self.ranks.all_load

    @property
    def worker_init_fn(self) -> Any:
        """The function of the rank's own loader. Lightning sets this attribute to seed the loader's workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    @property
    def makes_tensors(self) -> bool:
        """Whether each batch has new tensors. If not, the user's code may use a batch's tensors elsewhere as well."""
        loader = self.loader
        if not isinstance(loader, DataLoader):
            return False
        return bool(loader.num_workers) or (loader.batch_sampler is not None and loader.collate_fn is default_collate)

    @property
    def has_own_order(self) -> bool:
        """Whether the order of the samples does not depend on the states of the global random generators."""
        samplers = [sampler for sampler in samplers_of(self.loader) if isinstance(sampler, DistributedSampler)]
        # Lightning's wrapper draws the order from the user's own sampler.
        return bool(samplers) and not any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)

    def _describe_stream(self) -> str:
        if not self.ranks.all_load:
            return str(self.loader.describe_stream())
        return f"{type(self.loader.dataset).__name__} divides its samples among {self.ranks.number} processes itself"

    # Parts of batches

    def _own(self, batches: Iterable[Any]) -> Iterator[Any]:
        left, sampler = self._real_samples(), batches_of(self.loader)
        for index, batch in enumerate(batches):
            if batch is None:
                yield None if self.ranks.all_load else NoneBatch()
                continue
            part = take_apart(batch, self._sendable)
            # A rank that does not have a sample in a batch repeats a sample of another rank.
            has_sample = sampler is None or sampler.counts(sampler.skip + index)[sampler.rank] > 0
            samples = count_samples(part) if has_sample else 0
            self._count = samples if left is None else min(samples, left)
            if left is None:
                yield part if has_sample else None
                continue
            if left:
                yield first_rows(part, samples, left) if samples > left else part
            left -= self._count

    def _real_samples(self) -> int | None:
        """Return the number of samples of this rank without samples that the sampler repeats.

        Return None if the loader's sampler does not repeat samples.
        """
        sampler = getattr(self.loader, "sampler", None)
        if (
            not isinstance(self.loader, DataLoader)
            or self.loader.batch_size is None
            or not isinstance(sampler, DistributedSampler)
            or sampler.shuffle
        ):
            return None
        return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]

    def _sendable(self, tensor: Tensor, path: str) -> Tensor:
        sendable(tensor, path)
        # All replicas of the first stage join the same values, and their results need equal strides as well.
        return tensor if len(self.sources) == 1 else tensor.contiguous()

    def note_indices(self, index: int) -> None:
        """Put the indices of a global batch's samples where Lightning's prediction writers read them.

        Only rank 0 gets predictions. All ranks must call this for each batch.

        Args:
            index: Index of the batch in its epoch.
        """
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        if self.ranks.all_load and hasattr(self, "describe_stream"):
            sampler.seen_batch_indices = []  # Each rank knows positions in its own part of the stream only.
        elif self.ranks.all_load:
            seen = getattr(sampler, "seen_batch_indices", [])
            indices = self.ranks.indices(seen[index][: self._count] if index < len(seen) else [])
            # Lightning reads the list at this place on every rank, and a rank may have fewer batches than others.
            seen += [[]] * (index + 1 - len(seen))
            seen[index] = indices
        elif sampler is not None and self.places.rank:
            sampler.seen_batch_indices = [[]] * (index + 1)
        elif hasattr(sampler, "seen_batch_indices"):
            indices = sampler.seen_batch_indices[index]
            sampler.seen_batch_indices[index] = _of_all_replicas(indices, getattr(sampler, "sampler", None))


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else 0


def _of_all_replicas(indices: list[int], sampler: object) -> list[int]:
    """Return the indices of all replicas' samples in a batch. The replicas take turns in the order of the samples.

    Args:
        indices: Indices of the first replica's samples.
        sampler: The first replica's sampler.
    """
    if not isinstance(sampler, DistributedSampler):
        return indices
    every = [first + replica for first in indices for replica in range(sampler.num_replicas)]
    return [index for index in every if index < len(sampler.dataset)]  # type: ignore[arg-type]
