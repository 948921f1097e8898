"""Whole batches from a dataset, reproducible and resumable."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cnnstrategies.data.sampling import BatchRequest, ShuffledBatches
from cnnstrategies.data.shared_batches import Lent, SharedBatches, shared_batches
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


class BatchDataset(Dataset[Batch | Lent | ConfigurationError]):
    """Maps a :class:`BatchRequest` to a finished batch, in the worker process.

    Random transforms are seeded by the request, so augmentation depends neither on the number of workers nor on
    where a resumed run began.

    Attributes:
        shared: Where workers that are forked now put their batches.

    Args:
        give_indices: In place of targets, for predict.
    """

    shared: SharedBatches | None = None

    def __init__(self, source: Source, transform: Transform, give_indices: bool = False) -> None:
        self.source = source
        self.transform = transform
        self.give_indices = give_indices

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, request: BatchRequest) -> Batch | Lent | ConfigurationError:
        """The batch, or the error that kept it from being read; raised here, a worker would add its traceback to it."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(request.seed)  # `torch.manual_seed` would look for accelerators, too.
            try:
                images, targets = self.source.fetch(request.indices)
            except ConfigurationError as error:
                return error
            images = self.transform(images)
        batch = images, torch.tensor(request.indices) if self.give_indices else targets
        worker = get_worker_info()
        if worker is None or self.shared is None:
            return batch
        return self.shared.lend(batch, worker.id) or batch


class BatchLoader(DataLoader[Batch | Lent | ConfigurationError]):
    """A DataLoader over batch requests that can go on in the middle of an epoch.

    Lightning stores :meth:`state_dict` in its checkpoints and hands it back on resume. The batches already served
    are then skipped in the sampler; nothing is loaded for them. Its arguments are ``DataLoader``'s, because Lightning
    builds it anew for predict; ``sampler`` gives whole batches and ``batch_size`` is None, so there is no collation.
    """

    dataset: BatchDataset
    _shared: SharedBatches | None = None
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
        shared = self.memory_of_workers()  # Until the last batch is taken.
        # Counted here, not in the sampler, which is ahead of the training loop by what the workers prefetch.
        for batch in self._begun(shared):
            if isinstance(batch, ConfigurationError):
                # Another exception: this one's traceback would hold the frame that holds it, and an iterator that the
                # garbage collector finds in such a cycle waits 5 s for each of its workers.
                raise ConfigurationError(str(batch))
            self._served += 1
            yield batch

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

    def memory_of_workers(self) -> SharedBatches | None:
        """Theirs alone, since two iterators have workers of the same numbers: that of persistent ones, or new memory.

        Returns:
            None where the workers can have none.
        """
        shared = self._shared
        if shared is None:
            # A batch that is made and one that is used, beside those that are ready.
            each = (self.prefetch_factor or 0) + 2
            shared = shared_batches(self.num_workers, each, self.multiprocessing_context)
        if self.persistent_workers:
            self._shared = shared
        return shared

    def _begun(self, shared: SharedBatches | None) -> Iterator[Batch | ConfigurationError]:
        self.dataset.shared = shared
        try:
            return super().__iter__()
        finally:
            self.dataset.shared = None

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
                f"run makes other batches ({', '.join(changed)}): restore them (samples_per_batch is over all "
                "processes, of each of the accumulated batches) or resume from a checkpoint of an epoch's end"
            )
        return resume["served"]
