"""Whole batches from a dataset, reproducible and resumable."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cnnstrategies.data.sampling import BatchRequest, OrderedBatches, ShuffledBatches

Batch = tuple[Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]


class Source(Protocol):
    """Samples that are fetched many at a time."""

    def __len__(self) -> int:
        """Number of samples."""

    def fetch(self, indices: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """The samples at ``indices``.

        Returns:
            Images (n, C, H, W), targets (n,) int64, and the indices that they belong to, which are fewer than
            asked for where broken files are skipped.
        """


class TensorSource:
    """Samples that lie in memory.

    Args:
        images: uint8 (N, C, H, W).
        targets: int64 (N,).
    """

    def __init__(self, images: Tensor, targets: Tensor) -> None:
        self.images = images
        self.targets = targets

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        """The samples at ``indices``, by one indexing operation."""
        chosen = torch.tensor(indices)
        return self.images[chosen], self.targets[chosen], indices


class BatchDataset(Dataset[Batch]):
    """Maps a :class:`BatchRequest` to a finished batch, in the worker process.

    Random transforms are seeded by the request, so augmentation depends neither on the number of workers nor on
    where a resumed run began.

    Args:
        source: Where the samples come from.
        transform: Applied to the images of the whole batch.
        give_indices: Give the samples' indices in place of their targets, for predict.
    """

    def __init__(self, source: Source, transform: Transform, give_indices: bool = False) -> None:
        self.source = source
        self.transform = transform
        self.give_indices = give_indices

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, request: BatchRequest) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(request.seed)
            images, targets, indices = self.source.fetch(request.indices)
            images = self.transform(images)
        return images, torch.tensor(indices) if self.give_indices else targets


class BatchLoader(DataLoader[Batch]):
    """A DataLoader over batch requests that can go on in the middle of an epoch.

    Lightning stores :meth:`state_dict` in its checkpoints and hands it back on resume. The batches already served
    are then skipped in the sampler; nothing is loaded for them.

    Args:
        dataset: Answers the requests.
        sampler: Makes them; the whole batch is one request, so there is no collation.
        **kwargs: Those of ``DataLoader``.
    """

    def __init__(self, dataset: BatchDataset, sampler: ShuffledBatches | OrderedBatches, **kwargs: Any) -> None:
        # A generator of its own: the base seed that each epoch's workers draw leaves the global generator alone.
        super().__init__(dataset, sampler=sampler, batch_size=None, generator=torch.Generator(), **kwargs)
        self._served = 0
        self._epoch = 0
        self._resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Serve the epoch's batches, after a resume those that are left."""
        sampler = self.sampler
        if isinstance(sampler, ShuffledBatches):
            resume, self._resume = self._resume, None
            # Saved at the end of an epoch, the state is that epoch's, and this is the next.
            sampler.skip = resume["served"] if resume is not None and resume["epoch"] == sampler.epoch else 0
            self._served, self._epoch = sampler.skip, sampler.epoch
        # Counted here, not in the sampler, which is ahead of the training loop by what the workers prefetch.
        for batch in super().__iter__():
            self._served += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The epoch and the number of its batches that were served."""
        return {"epoch": self._epoch, "served": self._served}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after the batches that ``state_dict`` counts, if the next epoch iterated is the same."""
        self._resume = dict(state_dict)
