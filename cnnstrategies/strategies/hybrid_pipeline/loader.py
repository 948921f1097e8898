"""Data for a pipeline: the first stage's replicas load batches, the other ranks wait for as many."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from cnnstrategies.models.samples import count_samples
from cnnstrategies.strategies.hybrid_pipeline.batches import first_rows


class NoBatch(tuple[Any, ...]):
    """What a rank gets that loads nothing: ``(images, targets)`` of no samples."""

    __slots__ = ()

    def __new__(cls, items: Any = ()) -> "NoBatch":
        """The same empty pair, whatever it is made from."""
        return super().__new__(cls, (torch.empty(0), torch.empty(0, dtype=torch.int64)))


class StageLoader:
    """Yields the same number of batches on every rank.

    Samples that Lightning's sampler repeats to make the shards of an evaluation even are left out again.

    Args:
        loader: The rank's own loader; iterated in the first stage only.
        most: The greatest of some numbers over all ranks; a collective.

    Attributes:
        usual: Samples of a batch that is not the last; None where that is not known.
    """

    def __init__(self, loader: Any, loads: bool, most: Callable[[int], int]) -> None:
        self.loader = loader
        self.loads = loads
        self.most = most
        try:
            self.length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self.length = None
        self.usual = most(_batch_size(loader)) or None
        longest = most(-1 if self.length is None else self.length)
        self.length = None if self.length is None else longest
        # Lightning asks a loader that can go on in the middle of an epoch by its class or its own attributes.
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # Not there yet while an instance is unpickled.
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """The loader's own; Lightning sets it to seed the workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    def __len__(self) -> int:
        """Batches of every rank."""
        if self.length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, then empty ones until every rank has had its last."""
        batches = self._own() if self.loads else iter(())
        served = 0
        while self.length is None or served < self.length:
            batch = next(batches, None)
            # Without a length it is not known before which rank is the last.
            if self.length is None and not self.most(int(batch is not None)):
                return
            served += 1
            yield NoBatch() if batch is None else batch

    def _own(self) -> Iterator[Any]:
        left = self._real_samples()
        for batch in self.loader:
            if left is None:
                yield batch
                continue
            size = count_samples(batch)
            if left:
                yield first_rows(batch, left) if size > left else batch
            left -= min(size, left)

    def _real_samples(self) -> int | None:
        """Samples of this shard without repeated ones, where the loader's sampler may repeat some."""
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


class PredictionLoader(StageLoader):
    """A :class:`StageLoader` that tells Lightning's prediction writers what rows a rank has, all of them or none."""

    def __init__(self, loader: Any, loads: bool, most: Callable[[int], int], has_rows: bool) -> None:
        super().__init__(loader, loads, most)
        self.has_rows = has_rows

    def __iter__(self) -> Iterator[Any]:
        """As that of other loaders."""
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        for place, batch in enumerate(super().__iter__()):
            if sampler is not None and not self.has_rows:
                sampler.seen_batch_indices = [[]] * (place + 1)
            elif hasattr(sampler, "seen_batch_indices"):
                own = sampler.seen_batch_indices[place]
                sampler.seen_batch_indices[place] = _of_all_replicas(own, getattr(sampler, "sampler", None))
            yield batch


def _of_all_replicas(indices: list[int], sampler: object) -> list[int]:
    """The indices of a batch of all replicas, from those of the first, which take turns."""
    if not isinstance(sampler, DistributedSampler):
        return indices
    every = [first + replica for first in indices for replica in range(sampler.num_replicas)]
    return [index for index in every if index < len(sampler.dataset)]  # type: ignore[arg-type]
