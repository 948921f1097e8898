"""A training loader whose batches the coordinator gives to the workers that ask for them.

All workers know the same order of an epoch's batches, so that the coordinator names batches by their positions.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler

from cnnstrategies._lightning_private import wrapped_sampler
from cnnstrategies.data.sampling import items_of, options_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy


class ChunkSampler:
    """Yields the items of a sampler whose positions the coordinator gives to this worker.

    Attributes:
        epoch: The epoch that is being given out.
        count: Number of items of the epoch.
        before: State of a checkpoint: the epoch, its number of items, and the items that had been processed.

    Args:
        sampler: Sampler, or batch sampler, of the whole epoch.
        dispatch: Link to the coordinator.
    """

    def __init__(self, sampler: Any, dispatch: "BatchDispatch") -> None:
        self.sampler = sampler
        self.dispatch = dispatch
        self.epoch = self.count = 0
        self.before = (-1, 0, "")

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's items of the epoch until the coordinator has none left."""
        epochs = {self.epoch: items_of(self.sampler, self.epoch)}
        self.count = len(epochs[self.epoch])
        epoch, count, done = self.before
        if epoch == self.epoch and count != self.count:
            raise ConfigurationError(
                f"the checkpoint was saved within epoch {epoch} of {count} batches, and this run's epochs have "
                f"{self.count}: restore the data and the batch size, or resume from the end of an epoch"
            )
        self.dispatch.begin(self.epoch, self.count, done if epoch == self.epoch else "")
        while chunk := self.dispatch.take(self.epoch):
            if chunk.epoch not in epochs:
                # A worker that died at the end of an earlier epoch has left these items.
                epochs[chunk.epoch] = items_of(self.sampler, chunk.epoch)
            yield from epochs[chunk.epoch][chunk.start : chunk.stop]


class BatchDispatch:
    """Takes this worker's batches from the coordinator, and tells it how many have been processed.

    Attributes:
        seen: Batches of the present epoch that this worker has begun.
        processed: Batches of the present epoch whose gradients have been sent.
        has_loader: Whether a training loader exists already.

    Args:
        strategy: The strategy, whose collectives reach the coordinator.
    """

    def __init__(self, strategy: CoordinatedStrategy) -> None:
        self.seen = self.processed = 0
        self.has_loader = False
        self._strategy = strategy

    def loader(self, dataloader: object, trainer: Trainer) -> "DispatchedLoader":
        """Return the training loader whose batches the coordinator gives out."""
        if self.has_loader:
            raise ConfigurationError(
                "training has several loaders (CombinedLoader), and data_dispatch: dynamic gives out the batches of "
                "one: use data_dispatch: static"
            )
        self.has_loader = True
        dispatched = DispatchedLoader(dataloader, self, trainer)
        check_order(dispatched.chunks.sampler, self._strategy)
        return dispatched

    def epoch(self, trainer: Trainer) -> int:
        """Return the epoch of a trainer that begins to load; `current_epoch` is too small in a resumed run."""
        return int(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]

    def begin(self, epoch: int, batches: int, done: str) -> None:
        """Announce an epoch to the coordinator.

        Args:
            epoch: Number of the epoch.
            batches: Number of its batches.
            done: The batches that were processed before the run began, as a checkpoint holds them.
        """
        workers = self._strategy.world_size
        if batches < workers:
            raise ConfigurationError(
                f"an epoch has {batches} batches for {workers} workers: lower the batch size so that each gets one"
            )
        self.seen = self.processed = 0
        self._strategy.collectives.begin_epoch(epoch, batches, 1, done)

    def progress(self, epoch: int) -> str:
        """Return the batches that all workers have processed, for the checkpoint that rank 0 saves; a collective."""
        run = self._strategy
        return "" if run.membership is None else run.collectives.progress(epoch, self.processed)

    def take(self, epoch: int) -> Chunk:
        """Return the next batches of an epoch for this worker."""
        return self._strategy.collectives.take(epoch, self.processed)


class DispatchedLoader(DataLoader[Any]):
    """A loader without a length: the number of a worker's batches is known only at the end of an epoch."""

    def __init__(self, loader: Any, dispatch: BatchDispatch, trainer: Trainer) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"the training data is a {type(loader).__name__}, and data_dispatch: dynamic needs a torch DataLoader: "
                "use data_dispatch: static"
            )
        self.dispatch = dispatch
        self.trainer = trainer
        whole = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        distributed(whole)
        self.chunks = ChunkSampler(whole, dispatch)
        options = options_of(loader)
        if whole is loader.sampler:
            options |= {"sampler": self.chunks, "batch_size": None}
        else:
            options["batch_sampler"] = self.chunks
        super().__init__(loader.dataset, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, its number of batches, and the batches that any worker has processed.

        Batches of the previous epoch that a dead worker has left are not part of the state.
        """
        epoch = self.chunks.epoch
        return {"epoch": epoch, "batches": self.chunks.count, "done": self.dispatch.progress(epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Skip the batches that were processed before the checkpoint was saved."""
        if not {"epoch", "batches", "done"} <= state.keys():
            raise ConfigurationError(
                "the checkpoint was saved within an epoch of data_dispatch: static, and this run has data_dispatch: "
                "dynamic: resume with data_dispatch: static, or from the end of an epoch"
            )
        self.chunks.before = int(state["epoch"]), int(state["batches"]), str(state["done"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield this worker's batches of the trainer's epoch."""
        self.chunks.epoch = self.dispatch.epoch(self.trainer)
        for batch in super().__iter__():
            if isinstance(batch, ConfigurationError):
                raise ConfigurationError(str(batch))
            yield batch


def check_order(sampler: Any, strategy: CoordinatedStrategy) -> None:
    """Refuse a user's own sampler whose order changes from call to call or from worker to worker; a collective."""
    inner = distributed(sampler)
    if not isinstance(inner, DistributedSamplerWrapper):
        return
    drawn = [zlib.crc32(repr(items_of(sampler, 0)).encode()) for _ in range(2)]
    name = type(wrapped_sampler(inner)).__name__
    if drawn[0] != drawn[1]:
        raise ConfigurationError(
            f"{name} returns another order of the same epoch in each call, and data_dispatch: dynamic needs one order "
            "that all workers know: leave out the sampler's own generator, because torch's is seeded for each epoch, "
            "or use data_dispatch: static"
        )
    if len(set(strategy.gather(drawn[0], "order of the samples").values())) > 1:
        raise ConfigurationError(
            f"{name} returns another order in each worker, and data_dispatch: dynamic needs one order that all workers "
            "know: seed it equally in each worker (seed_everything), or use data_dispatch: static"
        )


def distributed(sampler: Any) -> DistributedSampler[Any]:
    """Return the distributed sampler inside a sampler or batch sampler; refuse all other samplers."""
    inner = getattr(sampler, "sampler", sampler)
    if not isinstance(inner, DistributedSampler):
        raise ConfigurationError(
            f"the training data is sampled by {type(inner).__name__}, and data_dispatch: dynamic needs a "
            "DistributedSampler: set trainer.use_distributed_sampler to true, or use data_dispatch: static"
        )
    return inner
