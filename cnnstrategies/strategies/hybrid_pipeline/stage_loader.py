"""Loader of a pipeline's batches, and the indices of a batch's samples for Lightning's prediction writers."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks


class StageLoader:
    """Base of loaders with the same number of batches on every rank.

    The ranks of the first stage load batches. If the user's code has divided the data among all ranks, all ranks load.
    Other attributes of a loader are those of the rank's own loader.

    Attributes:
        length: Number of batches of every rank; None if it is not known.

    Args:
        loader: This rank's own loader.
        ranks: The ranks that load.
        most: Function that returns the largest of the numbers that the ranks pass. All ranks must call this function.
    """

    def __init__(self, loader: Any, ranks: LoadingRanks, most: Callable[[int], int]) -> None:
        self.loader = loader
        self.ranks = ranks
        self._count = 0  # Number of samples of the last batch that this rank has loaded itself.
        try:
            length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            length = None
        self._batch_size = most(_batch_size(loader))
        longest = most(-1 if length is None else length)
        self.length = None if length is None else longest
        # To find out whether a loader can continue in the middle of an epoch, Lightning reads these attributes.
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # While an instance is unpickled, it does not have this attribute yet.
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def loads(self) -> bool:
        """Whether this rank loads batches, as far as this is known before the first batch."""
        return bool(self.ranks.all_load) or self.ranks.in_first_stage

    @property
    def loading_processes(self) -> int:
        """Number of ranks that load batches, as far as this is known before the first batch."""
        return self.ranks.number

    @property
    def usual(self) -> int | None:
        """Number of samples of a first stage's replica in a batch that is not the last; None if it is not known."""
        return -(-self._batch_size * self.ranks.number // self.ranks.replicas) or None

    @property
    def worker_init_fn(self) -> Any:
        """The function of the rank's own loader. Lightning sets this attribute to seed the loader's workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    def __len__(self) -> int:
        """Return the number of batches of every rank."""
        if self.length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self.length

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


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else 0


def note_indices(loader: Any, ranks: LoadingRanks, place: int, count: int, has_rows: bool) -> None:
    """Put the indices of a global batch's samples where Lightning's prediction writers read them.

    All ranks must call this for each batch.

    Args:
        loader: This rank's own loader.
        ranks: The ranks that load.
        place: Index of the batch in its epoch.
        count: Number of samples that this rank has loaded for the batch.
        has_rows: Whether this rank has the predictions of all samples. Otherwise it has none.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if ranks.all_load:
        seen = getattr(sampler, "seen_batch_indices", [])
        indices = ranks.indices(seen[place][:count] if place < len(seen) else [])
        # Lightning reads the list at this place on every rank, and a rank may have fewer batches than others.
        seen += [[]] * (place + 1 - len(seen))
        seen[place] = indices
    elif sampler is not None and not has_rows:
        sampler.seen_batch_indices = [[]] * (place + 1)
    elif hasattr(sampler, "seen_batch_indices"):
        indices = sampler.seen_batch_indices[place]
        sampler.seen_batch_indices[place] = _of_all_replicas(indices, getattr(sampler, "sampler", None))


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
