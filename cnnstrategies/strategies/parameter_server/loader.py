"""A training loader whose batches are given out by the coordinator, to whoever asks, in an order that all know."""

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
    """Yields those of a sampler's items whose positions are given out to this worker.

    Attributes:
        epoch: That is given out.
        count: Its number of items.
        before: Epoch, number of items, and what had been worked on of them when a checkpoint was saved.
    """

    def __init__(self, sampler: Any, dispatch: "BatchDispatch") -> None:
        self.sampler = sampler
        self.dispatch = dispatch
        self.epoch = self.count = 0
        self.before = (-1, 0, "")

    def __iter__(self) -> Iterator[Any]:
        """The items of this worker in the epoch that is given out, while there are some."""
        epochs = {self.epoch: items_of(self.sampler, self.epoch)}
        self.count = len(epochs[self.epoch])
        epoch, count, done = self.before
        if epoch == self.epoch and count != self.count:
            raise ConfigurationError(
                f"the checkpoint is from within epoch {epoch} of {count} batches, and this run's epochs have "
                f"{self.count}: restore the data and the batch size, or go on from the end of an epoch"
            )
        self.dispatch.begin(self.epoch, self.count, done if epoch == self.epoch else "")
        while chunk := self.dispatch.take(self.epoch):
            if chunk.epoch not in epochs:
                # Left behind by a worker that died at the end of an earlier epoch.
                epochs[chunk.epoch] = items_of(self.sampler, chunk.epoch)
            yield from epochs[chunk.epoch][chunk.start : chunk.stop]


class BatchDispatch:
    """Takes this worker's batches from the coordinator, and tells it how many of them have been processed.

    Attributes:
        seen: Batches of the present epoch that were worked on.
        processed: Those of them whose gradients have left.
    """

    def __init__(self, strategy: CoordinatedStrategy) -> None:
        self.seen = self.processed = 0
        self.has_loader = False
        self._strategy = strategy

    def loader(self, dataloader: object, trainer: Trainer) -> "DispatchedLoader":
        """The training loader in which batches are given out."""
        if self.has_loader:
            raise ConfigurationError(
                "training has several loaders (CombinedLoader): data_dispatch: dynamic gives out the batches of one, "
                "and those of the others would be given to nobody; use data_dispatch: static"
            )
        self.has_loader = True
        dispatched = DispatchedLoader(dataloader, self, trainer)
        check_order(dispatched.chunks.sampler, self._strategy)
        return dispatched

    def epoch(self, trainer: Trainer) -> int:
        """That of a trainer which begins to load; `current_epoch` lags behind in a resumed run."""
        return int(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]

    def begin(self, epoch: int, batches: int, done: str) -> None:
        """Announce an epoch, its number of batches, and those that were worked on before the run began."""
        workers = self._strategy.world_size
        if batches < workers:
            raise ConfigurationError(
                f"an epoch has {batches} batches for {workers} workers: lower the batch size so that each gets one"
            )
        self.seen = self.processed = 0
        self._strategy.collectives.begin_epoch(epoch, batches, 1, done)

    def progress(self, epoch: int) -> str:
        """What all have worked on, for rank 0, which saves it; called on every rank."""
        run = self._strategy
        return "" if run.membership is None else run.collectives.progress(epoch, self.processed)

    def take(self, epoch: int) -> Chunk:
        """The next ones of an epoch."""
        return self._strategy.collectives.take(epoch, self.processed)


class DispatchedLoader(DataLoader[Any]):
    """One without a length: how many batches a worker gets shows only while they are given out."""

    def __init__(self, loader: Any, dispatch: BatchDispatch, trainer: Trainer) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"the training data is a {type(loader).__name__}: data_dispatch: dynamic gives out the positions of a "
                "torch DataLoader; use data_dispatch: static"
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
        """For a checkpoint: the epoch, its number of batches, and which of them were worked on by anybody.

        What a worker has left behind that died at the end of the epoch before is not told.
        """
        epoch = self.chunks.epoch
        return {"epoch": epoch, "batches": self.chunks.count, "done": self.dispatch.progress(epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave out the batches that were worked on before the checkpoint was saved."""
        if not {"epoch", "batches", "done"} <= state.keys():
            raise ConfigurationError(
                "the checkpoint is from within an epoch that was divided among the ranks, and this run gives its "
                "batches out one by one: go on with data_dispatch: static, or from the end of an epoch"
            )
        self.chunks.before = int(state["epoch"]), int(state["batches"]), str(state["done"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the trainer's epoch that this worker is given."""
        self.chunks.epoch = self.dispatch.epoch(self.trainer)
        for batch in super().__iter__():
            if isinstance(batch, ConfigurationError):
                raise ConfigurationError(str(batch))
            yield batch


def check_order(sampler: Any, strategy: CoordinatedStrategy) -> None:
    """Refuse a sampler of the user's own that gives another order each time, or in each worker; a collective."""
    inner = distributed(sampler)
    if not isinstance(inner, DistributedSamplerWrapper):
        return
    drawn = [zlib.crc32(repr(items_of(sampler, 0)).encode()) for _ in range(2)]
    name = type(wrapped_sampler(inner)).__name__
    if drawn[0] != drawn[1]:
        raise ConfigurationError(
            f"{name} gives another order of an epoch's samples each time it is asked: data_dispatch: dynamic gives out "
            "places in an order that all workers know; leave out a generator of its own, as torch's is then seeded for "
            "each epoch, or use data_dispatch: static"
        )
    if len(set(strategy.gather(drawn[0], "order of the samples").values())) > 1:
        raise ConfigurationError(
            f"{name} gives the samples in another order in each worker: data_dispatch: dynamic gives out places in an "
            "order that all workers know; make it from the same seed in each (seed_everything), or use data_dispatch: "
            "static"
        )


def distributed(sampler: Any) -> DistributedSampler[Any]:
    """The distributed sampler in a batch sampler or sampler."""
    inner = getattr(sampler, "sampler", sampler)
    if not isinstance(inner, DistributedSampler):
        raise ConfigurationError(
            f"the training data is sampled by {type(inner).__name__}: data_dispatch: dynamic needs a "
            "DistributedSampler, which Lightning puts in place unless use_distributed_sampler is false"
        )
    return inner
