"""Whole batches from a dataset, reproducible and resumable."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cnnstrategies.data.sampling import BatchRequest, ShuffledBatches
from cnnstrategies.errors import ConfigurationError

Batch = tuple[Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]


class Source(Protocol):
    """Samples that are fetched many at a time."""

    def __len__(self) -> int:
        """Number of samples."""

    def fetch(self, indices: list[int]) -> Batch:
        """The samples at ``indices``: images (n, C, H, W) and targets (n,) int64.

        Raises:
            ConfigurationError: A sample cannot be read.
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

    def fetch(self, indices: list[int]) -> Batch:
        """The samples at ``indices``, by one indexing operation."""
        chosen = torch.tensor(indices)
        return self.images[chosen], self.targets[chosen]


class BatchDataset(Dataset[Batch | ConfigurationError]):
    """Maps a :class:`BatchRequest` to a finished batch, in the worker process.

    Random transforms are seeded by the request, so augmentation depends neither on the number of workers nor on
    where a resumed run began.

    Attributes:
        ready: Batches that each of the workers which are started now has ready; 0 leaves it to torch how to hand over.

    Args:
        give_indices: In place of targets, for predict.
    """

    ready = 0

    def __init__(self, source: Source, transform: Transform, give_indices: bool = False) -> None:
        self.source = source
        self.transform = transform
        self.give_indices = give_indices
        self._handed_over = 0
        self._memory: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, request: BatchRequest) -> Batch | ConfigurationError:
        """The batch, or the error that kept it from being read; raised here, a worker would add its traceback to it."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(request.seed)  # `torch.manual_seed` would look for accelerators, too.
            try:
                images, targets = self.source.fetch(request.indices)
            except ConfigurationError as error:
                return error
            images = self.transform(images)
        batch = images, torch.tensor(request.indices) if self.give_indices else targets
        return self._in_shared_memory(batch) if self.ready and get_worker_info() else batch

    def _in_shared_memory(self, batch: Batch) -> Batch:
        """A copy in memory of this worker that is taken in turn: with new memory a batch costs a fifth more.

        A loader asks for another batch when it has taken one, and has copied all before that: so that of one is in use
        beside those that are ready.
        """
        place = self._handed_over % (self.ready + 1)
        self._handed_over += 1
        shapes = [(one.shape, one.dtype) for one in batch]
        if place not in self._memory or shapes != [(one.shape, one.dtype) for one in self._memory[place]]:
            images, targets = (torch.empty_like(one).share_memory_() for one in batch)  # type: ignore[no-untyped-call]
            self._memory[place] = images, targets
        for mine, made in zip(self._memory[place], batch, strict=True):
            mine.copy_(made)
        return self._memory[place]


def taken(batch: Batch) -> Batch:
    """A batch as the training process keeps it; what lies in pinned memory is a copy already."""
    images, targets = (one.clone() if one.is_shared() else one for one in batch)  # type: ignore[no-untyped-call]
    return images, targets


class BatchLoader(DataLoader[Batch | ConfigurationError]):
    """A DataLoader over batch requests that can go on in the middle of an epoch.

    Lightning stores :meth:`state_dict` in its checkpoints and hands it back on resume. The batches already served
    are then skipped in the sampler; nothing is loaded for them. Its arguments are ``DataLoader``'s, because Lightning
    builds it anew for predict; ``sampler`` gives whole batches and ``batch_size`` is None, so there is no collation.
    """

    dataset: BatchDataset
    _served = 0
    _epoch = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Serve the epoch's batches, after a resume those that are left.

        A generator, so that nothing happens before the first batch is asked for: in the first epoch and in a resumed
        one, Lightning calls ``iter`` before ``set_epoch``.
        """
        sampler = self.sampler
        if isinstance(sampler, ShuffledBatches):
            sampler.skip = self._already_served(sampler)
            self._served, self._epoch = sampler.skip, sampler.epoch
        # Counted here, not in the sampler, which is ahead of the training loop by what the workers prefetch.
        for batch in self._begun():
            if isinstance(batch, ConfigurationError):
                # Another exception: this one's traceback would hold the frame that holds it, and an iterator that the
                # garbage collector finds in such a cycle waits 5 s for each of its workers.
                raise ConfigurationError(str(batch))
            self._served += 1
            yield taken(batch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, the number of its batches that were served, and what the batches depend on."""
        if self._resume is not None:
            return dict(self._resume)
        identity = self.sampler.identity() if isinstance(self.sampler, ShuffledBatches) else {}
        return {"epoch": self._epoch, "served": self._served, **identity}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after the batches that ``state_dict`` counts, if the next epoch iterated is the same."""
        if "served" not in state_dict:
            raise ConfigurationError(
                "the checkpoint is from within an epoch whose batches were given out one by one, and this run divides "
                "them among the ranks: go on with data_dispatch: dynamic, or from the end of an epoch"
            )
        self._resume = dict(state_dict)

    def _begun(self) -> Iterator[Batch | ConfigurationError]:
        self.dataset.ready = self.prefetch_factor or 0
        try:
            return super().__iter__()
        finally:
            self.dataset.ready = 0

    def _already_served(self, sampler: ShuffledBatches) -> int:
        resume, self._resume = self._resume, None
        # Saved at the end of an epoch, the state is that epoch's, and this is the next.
        if resume is None or resume["epoch"] != sampler.epoch or resume["served"] == 0:
            return 0
        before = {name: value for name, value in resume.items() if name not in ("epoch", "served")}
        now = sampler.identity()
        changed = [
            f"{name} was {before.get(name)} and is {now.get(name)}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise ConfigurationError(
                f"the checkpoint is from within epoch {resume['epoch']}, after {resume['served']} batches, and this "
                f"run makes other batches ({', '.join(changed)}): restore them (samples_of_a_step is over all "
                "processes) or resume from a checkpoint of an epoch's end"
            )
        return resume["served"]
