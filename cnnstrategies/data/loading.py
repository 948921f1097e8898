"""Loader that fetches whole batches, is reproducible, and can resume within an epoch."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.samplers import BatchRequest, ShuffledBatches

Batch = tuple[Tensor, Tensor]
Transform = Callable[[Tensor], Tensor]


class Source(Protocol):
    """Protocol of a data set that returns the samples of a whole batch in one call."""

    def __len__(self) -> int:
        """Number of samples."""

    def fetch(self, indices: list[int]) -> Batch:
        """Return the samples at ``indices``: images uint8 (n, C, H, W) and targets int64 (n,).

        Raises:
            ConfigurationError: A sample cannot be read.
        """


class TensorSource:
    """Source of samples in memory.

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
        """Return the images and targets at ``indices``."""
        chosen = torch.tensor(indices)
        return self.images[chosen], self.targets[chosen]


class BatchDataset(Dataset[Batch | ConfigurationError]):
    """Dataset that returns the transformed batch for a :class:`BatchRequest`.

    The seed in the request determines the random transforms. Augmentation therefore does not depend on the number of
    worker processes, nor on the batch at which a run is resumed.

    Args:
        source: Source of the samples.
        transform: Transform of a batch of images.
        give_indices: Whether a batch contains the samples' indices instead of targets, as for predict.

    Attributes:
        ready: Number of batches that each worker process prefetches. Set this number before the workers start. If the
            number is not 0, the workers return batches in blocks of shared memory, and reuse the blocks for later
            batches.
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
        """Return the batch, or the error if a sample cannot be read.

        The error is returned and not raised, because torch adds the worker's traceback to the text of a raised error.
        """
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would also seed the accelerators, whose state `fork_rng` does not restore here.
            torch.default_generator.manual_seed(request.seed)
            try:
                images, targets = self.source.fetch(request.indices)
            except ConfigurationError as error:
                return error
            images = self.transform(images)
        batch = images, torch.tensor(request.indices) if self.give_indices else targets
        return self._in_shared_memory(batch) if self.ready and get_worker_info() else batch

    def _in_shared_memory(self, batch: Batch) -> Batch:
        """Copy the batch into shared memory. Each worker reuses ``ready`` + 1 blocks of shared memory in turn.

        Allocating new shared memory for each batch would take a fifth more time than reusing blocks. One block more
        than ``ready`` is enough, because the loader copies a batch before it requests the next batch.
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
    """Copy a batch out of shared memory. Tensors in pinned memory are copies already, and are not copied."""
    copied: Batch = tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.is_shared() else tensor, batch)
    return copied


class BatchLoader(DataLoader[Batch | ConfigurationError]):
    """DataLoader that fetches whole batches and can resume within an epoch.

    Lightning saves :meth:`state_dict` in checkpoints, and passes it to :meth:`load_state_dict` when a run is resumed.
    The sampler then skips the batches that the loader had already returned, without loading them. The constructor has
    the arguments of ``DataLoader``, because Lightning builds the loader again for predict. ``sampler`` yields
    :class:`BatchRequest` objects. ``batch_size`` is None, so that torch does not collate.
    """

    dataset: BatchDataset
    _served = 0
    _epoch = 0
    _resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Yield the batches of an epoch. In a resumed epoch, yield the remaining batches.

        This method is a generator, because in the first epoch and in a resumed epoch Lightning calls ``iter`` before
        ``set_epoch``. A generator runs no code before the first batch is requested.
        """
        sampler = self.sampler
        if isinstance(sampler, ShuffledBatches):
            sampler.skip = self._already_served(sampler)
            self._served, self._epoch = sampler.skip, sampler.epoch
        # Batches are counted here and not in the sampler, which would also count batches that workers have prefetched.
        for batch in self._start_iterator():
            if isinstance(batch, ConfigurationError):
                # Raising `batch` itself would create a reference cycle: its traceback refers to this frame, which
                # refers to `batch` and to the iterator. When the garbage collector deletes an iterator in a cycle,
                # torch waits 5 s for each worker.
                raise ConfigurationError(str(batch))
            self._served += 1
            yield unshared(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the number of batches that the loader has returned in it, and the sampler's settings.

        The settings are those of :meth:`ShuffledBatches.identity`, and are missing for other samplers.
        """
        if self._resume is not None:
            return dict(self._resume)
        identity = self.sampler.identity() if isinstance(self.sampler, ShuffledBatches) else {}
        return {"epoch": self._epoch, "served": self._served, **identity}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Skip the batches that the loader had returned before ``state_dict`` was saved.

        The batches are skipped only if the next epoch is the epoch in which ``state_dict`` was saved.

        Raises:
            ConfigurationError: The state was saved within an epoch with dynamic dispatch.
        """
        if "served" not in state_dict:
            raise ConfigurationError(
                "the checkpoint was saved within an epoch with `data_dispatch: dynamic`, but this run does not use "
                "this option: set `data_dispatch: dynamic`, or resume from a checkpoint that was saved at the end of "
                "an epoch"
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
        # A state that was saved at the end of an epoch contains the number of the finished epoch. The next epoch has a
        # different number, so it starts with its first batch.
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
                "all processes), or resume from a checkpoint that was saved at the end of an epoch"
            )
        return resume["served"]
