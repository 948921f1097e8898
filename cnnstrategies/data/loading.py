"""Loaders of whole batches that are reproducible and resumable."""

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
    """Samples that are fetched several at a time."""

    def __len__(self) -> int:
        """Number of samples."""

    def fetch(self, indices: list[int]) -> Batch:
        """Return the samples at ``indices``: images (n, C, H, W) and targets (n,) int64.

        Raises:
            ConfigurationError: A sample cannot be read.
        """


class TensorSource:
    """Samples in memory.

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
        """Return the samples at ``indices``, by one indexing operation."""
        chosen = torch.tensor(indices)
        return self.images[chosen], self.targets[chosen]


class BatchDataset(Dataset[Batch | ConfigurationError]):
    """Dataset that maps a :class:`BatchRequest` to a finished batch, in the loader's worker process.

    The request seeds the random transforms, so augmentation depends neither on the number of workers nor on the place
    where a resumed run begins.

    Args:
        source: The samples.
        transform: Transform of a batch of images.
        give_indices: Whether a batch has the samples' indices in place of targets, for predict.

    Attributes:
        ready: Number of batches that each worker prepares ahead, which must be set when the workers start. 0 leaves the
            transfer of batches to torch.
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
        """Return the batch, or the error that prevented reading it.

        The error is returned because a worker would add its own traceback to an error that is raised here.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(request.seed)  # `torch.manual_seed` would also look for accelerators.
            try:
                images, targets = self.source.fetch(request.indices)
            except ConfigurationError as error:
                return error
            images = self.transform(images)
        batch = images, torch.tensor(request.indices) if self.give_indices else targets
        return self._in_shared_memory(batch) if self.ready and get_worker_info() else batch

    def _in_shared_memory(self, batch: Batch) -> Batch:
        """Return a copy of the batch in shared memory, which this worker uses in rotation.

        New shared memory for each batch would cost a fifth more time. A loader requests the next batch after it has
        copied the previous one, so at most one batch is in use beside the `ready` batches.
        """
        slot = self._handed_over % (self.ready + 1)
        self._handed_over += 1
        shapes = [(tensor.shape, tensor.dtype) for tensor in batch]
        if slot not in self._memory or shapes != [(tensor.shape, tensor.dtype) for tensor in self._memory[slot]]:
            images, targets = (torch.empty_like(tensor).share_memory_() for tensor in batch)  # type: ignore[no-untyped-call]
            self._memory[slot] = images, targets
        for shared, tensor in zip(self._memory[slot], batch, strict=True):
            shared.copy_(tensor)
        return self._memory[slot]


def unshared(batch: Batch) -> Batch:
    """Return a batch outside shared memory. Tensors in pinned memory are copies already and stay as they are."""
    images, targets = (tensor.clone() if tensor.is_shared() else tensor for tensor in batch)  # type: ignore[no-untyped-call]
    return images, targets


class BatchLoader(DataLoader[Batch | ConfigurationError]):
    """DataLoader over batch requests that can resume in the middle of an epoch.

    Lightning stores :meth:`state_dict` in its checkpoints and passes it to :meth:`load_state_dict` on resume. The
    sampler then skips the batches that were served, so nothing is loaded for them. The arguments are those of
    ``DataLoader``, because Lightning builds the loader again for predict. ``sampler`` yields requests of whole batches
    and ``batch_size`` is None, so nothing is collated.
    """

    dataset: BatchDataset
    _served = 0
    _epoch = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield the epoch's batches; after a resume the remaining ones.

        This method is a generator, so that nothing happens before the first batch is requested: in the first epoch and
        in a resumed epoch, Lightning calls ``iter`` before ``set_epoch``.
        """
        sampler = self.sampler
        if isinstance(sampler, ShuffledBatches):
            sampler.skip = self._already_served(sampler)
            self._served, self._epoch = sampler.skip, sampler.epoch
        # Batches are counted here because the sampler is ahead of the training loop by the workers' prefetched batches.
        for batch in self._start_iterator():
            if isinstance(batch, ConfigurationError):
                # A new exception is raised because the traceback of `batch` would refer to this frame, which refers to
                # `batch`. If the garbage collector finds the iterator in such a cycle, it waits 5 s for each worker.
                raise ConfigurationError(str(batch))
            self._served += 1
            yield unshared(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of its batches that were served, and the sampler's identity."""
        if self._resume is not None:
            return dict(self._resume)
        identity = self.sampler.identity() if isinstance(self.sampler, ShuffledBatches) else {}
        return {"epoch": self._epoch, "served": self._served, **identity}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches that ``state_dict`` counts, if the next iterated epoch is the same epoch.

        Raises:
            ConfigurationError: The state is from within an epoch with dynamic dispatch.
        """
        if "served" not in state_dict:
            raise ConfigurationError(
                "the checkpoint was saved within an epoch with data_dispatch: dynamic, and this run divides the "
                "batches among the ranks: resume with data_dispatch: dynamic, or from a checkpoint of an epoch's end"
            )
        self._resume = dict(state_dict)

    def _start_iterator(self) -> Iterator[Batch | ConfigurationError]:
        self.dataset.ready = self.prefetch_factor or 0
        try:
            return super().__iter__()
        finally:
            self.dataset.ready = 0

    def _already_served(self, sampler: ShuffledBatches) -> int:
        resume, self._resume = self._resume, None
        # A state that was saved at the end of an epoch belongs to that epoch: the next epoch starts at its beginning.
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
                f"the checkpoint was saved within epoch {resume['epoch']}, after {resume['served']} batches, and this "
                f"run has different batches ({', '.join(changed)}): restore these settings (samples_of_a_step counts "
                "all processes) or resume from a checkpoint of an epoch's end"
            )
        return resume["served"]
