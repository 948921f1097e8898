"""Loading with ``data_dispatch: dynamic``: the coordinator assigns batches to the workers that request them.

All workers compute the same order of an epoch's batches, so the coordinator sends only positions in this order.
"""

import zlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler

from cnnstrategies._lightning_private import wrapped_sampler
from cnnstrategies.data.division import describe_loader, same_loaders
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.dispatch import Chunk
from cnnstrategies.shares.loaders import items_of, options_of
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.streams import StreamLoader


class ChunkSampler:
    """Sampler that yields those items of another sampler that the coordinator assigns to this worker.

    An item is the index of a sample, or a list with the indices of a batch. The coordinator sends the positions of the
    assigned items in the other sampler's order.

    Attributes:
        epoch: Number of the current epoch.
        count: Number of items in the current epoch, for all workers together.
        before: State from a checkpoint: number of the epoch, number of items in that epoch, and a text that encodes the
            positions of the processed items. The epoch is -1 if no state was loaded.

    Args:
        sampler: Sampler or batch sampler that yields the items of a whole epoch.
        dispatch: Object that requests positions from the coordinator.
    """

    def __init__(self, sampler: Any, dispatch: "BatchDispatch") -> None:
        self.sampler = sampler
        self.dispatch = dispatch
        self.epoch = self.count = 0
        self.before = (-1, 0, "")

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's items of the epoch until the coordinator has no items left."""
        epochs = {self.epoch: items_of(self.sampler, self.epoch)}
        self.count = len(epochs[self.epoch])
        epoch, count, done = self.before
        if epoch == self.epoch and count != self.count:
            raise ConfigurationError(
                f"the checkpoint was saved within epoch {epoch}, which had {count} batches, but an epoch of this run "
                f"has {self.count}: use the data and the batch size of the checkpoint's run, or resume from a "
                "checkpoint that was saved at the end of an epoch"
            )
        self.dispatch.begin(self.epoch, self.count, done if epoch == self.epoch else "")
        while chunk := self.dispatch.take(self.epoch):
            if chunk.epoch not in epochs:
                # These items belong to an earlier epoch. Another worker took them and died at the end of that epoch, so
                # this worker processes them instead.
                epochs[chunk.epoch] = items_of(self.sampler, chunk.epoch)
            yield from epochs[chunk.epoch][chunk.start : chunk.stop]


class BatchDispatch:
    """Client that requests this worker's batches from the coordinator, and reports the number of processed batches.

    Attributes:
        seen: Number of batches of the current epoch that this worker has begun.
        processed: Number of batches of the current epoch whose gradients this worker has sent.
        has_loader: Whether a training loader exists already.

    Args:
        strategy: The strategy. Its collectives send the requests.
    """

    def __init__(self, strategy: CoordinatedStrategy) -> None:
        self.seen = self.processed = 0
        self.has_loader = False
        self._strategy = strategy

    def loader(self, dataloader: object, trainer: Trainer) -> "DispatchedLoader":
        """Return a training loader whose batches come from the coordinator.

        Args:
            dataloader: The DataLoader of all batches.
            trainer: The trainer that trains with the loader.

        Raises:
            ConfigurationError: This is a second training loader, or the loader's class, its sampler, its data set or
                the order of its samples does not work with ``data_dispatch: dynamic``.
        """
        if self.has_loader:
            raise ConfigurationError(
                "training has several loaders (CombinedLoader), but `data_dispatch: dynamic` works with a single "
                "loader only: use one loader, or `data_dispatch: static`"
            )
        self.has_loader = True
        dispatched = DispatchedLoader(dataloader, self, trainer)
        check_data(dispatched.dataset, self._strategy)
        check_order(dispatched.chunks.sampler, self._strategy)
        return dispatched

    def epoch(self, trainer: Trainer) -> int:
        """Return the number of the epoch whose batches a trainer loads next.

        In a resumed run the trainer's `current_epoch` may be too small.
        """
        return int(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]

    def begin(self, epoch: int, batches: int, done: str) -> None:
        """Tell the coordinator that an epoch begins.

        Args:
            epoch: Number of the epoch.
            batches: Number of batches in the epoch, for all workers together.
            done: A text from a checkpoint that encodes the positions of the processed batches; empty if there are none.
        """
        workers = self._strategy.world_size
        if batches < workers:
            raise ConfigurationError(
                f"an epoch has {batches} batches for {workers} workers: lower the batch size, so that each worker gets "
                "at least one batch"
            )
        self.seen = self.processed = 0
        self._strategy.collectives.begin_epoch(epoch, batches, 1, done)

    def progress(self, epoch: int) -> str:
        """Return a text that encodes the positions of all batches that the workers have processed.

        The text is saved in a checkpoint. All workers must call this.
        """
        run = self._strategy
        return "" if run.membership is None else run.collectives.progress(epoch, self.processed)

    def take(self, epoch: int) -> Chunk:
        """Request this worker's next batches of an epoch, and return their positions.

        The result is empty if the epoch has no batches left.
        """
        return self._strategy.collectives.take(epoch, self.processed)


class DispatchedLoader(DataLoader[Any]):
    """DataLoader of the batches that the coordinator gives to this worker.

    The loader has no length, because the number of this worker's batches is known only at the end of an epoch.

    Args:
        loader: The DataLoader of all batches.
        dispatch: Object that requests positions from the coordinator.
        trainer: The trainer that trains with the loader.
    """

    def __init__(self, loader: Any, dispatch: BatchDispatch, trainer: Trainer) -> None:
        if isinstance(loader, StreamLoader):
            raise ConfigurationError(
                f"{type(loader.dataset).__name__} is a stream without indices, but `data_dispatch: dynamic` assigns "
                "samples by their indices: use a data set with `__len__` and `__getitem__`, or `data_dispatch: static`"
            )
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"the training loader is a {type(loader).__name__}, but `data_dispatch: dynamic` needs a torch "
                "DataLoader: use a DataLoader, or `data_dispatch: static`"
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
        """Return the progress within the epoch, for a checkpoint. All workers must call this.

        The dictionary has three keys. ``epoch`` is the number of the epoch, ``batches`` the number of batches in the
        epoch, and ``done`` a text that encodes the positions of the processed batches. If a worker died at the end of
        the previous epoch, the state does not contain the dead worker's unprocessed batches.
        """
        epoch = self.chunks.epoch
        return {"epoch": epoch, "batches": self.chunks.count, "done": self.dispatch.progress(epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the progress within an epoch, so that the batches that were processed already are skipped.

        Raises:
            ConfigurationError: The state was saved with ``data_dispatch: static``.
        """
        if not {"epoch", "batches", "done"} <= state.keys():
            raise ConfigurationError(
                "the checkpoint was saved within an epoch with `data_dispatch: static`, but this run has "
                "`data_dispatch: dynamic`: set `data_dispatch: static`, or resume from a checkpoint that was saved at "
                "the end of an epoch"
            )
        self.chunks.before = int(state["epoch"]), int(state["batches"]), str(state["done"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the trainer's current epoch that the coordinator assigns to this worker."""
        self.chunks.epoch = self.dispatch.epoch(self.trainer)
        for batch in super().__iter__():
            if isinstance(batch, ConfigurationError):
                raise ConfigurationError(str(batch))
            yield batch


def check_data(dataset: Any, strategy: CoordinatedStrategy) -> None:
    """Refuse a data set that differs from worker to worker. All workers must call this.

    Raises:
        ConfigurationError: The data sets have different sizes, or their first or last items differ.
    """
    rows = list(strategy.gather(describe_loader(DataLoader(dataset)), "data set").values())
    if not all(same_loaders(rows[0], row) for row in rows):
        raise ConfigurationError(
            "each worker has a different data set, for example a Subset by rank, but `data_dispatch: dynamic` assigns "
            "the samples of one data set that all workers have: pass the whole data set to each worker, or use "
            "`data_dispatch: static`"
        )


def check_order(sampler: Any, strategy: CoordinatedStrategy) -> None:
    """Refuse a user's own sampler that does not give one fixed order for each epoch. All workers must call this.

    Raises:
        ConfigurationError: The order differs between two calls, or between workers.
    """
    inner = distributed(sampler)
    if not isinstance(inner, DistributedSamplerWrapper):
        return
    drawn = [zlib.crc32(repr(items_of(sampler, 0)).encode()) for _ in range(2)]
    name = type(wrapped_sampler(inner)).__name__
    if drawn[0] != drawn[1]:
        raise ConfigurationError(
            f"{name} returns the samples of an epoch in a different order in each call, but `data_dispatch: dynamic` "
            "needs an order that all workers know: create the sampler without a generator of its own, because torch's "
            "generator is seeded for each epoch, or use `data_dispatch: static`"
        )
    if len(set(strategy.gather(drawn[0], "order of the samples").values())) > 1:
        raise ConfigurationError(
            f"{name} returns the samples of an epoch in a different order in each worker, but `data_dispatch: dynamic` "
            "needs an order that all workers know: seed all workers equally (seed_everything), or use `data_dispatch: "
            "static`"
        )


def distributed(sampler: Any) -> DistributedSampler[Any]:
    """Return a distributed sampler: the argument itself, or the sampler inside a batch sampler.

    Raises:
        ConfigurationError: The sampler is not a DistributedSampler.
    """
    inner = getattr(sampler, "sampler", sampler)
    if not isinstance(inner, DistributedSampler):
        raise ConfigurationError(
            f"the training loader has the sampler {type(inner).__name__}, but `data_dispatch: dynamic` needs a "
            "DistributedSampler: set trainer.use_distributed_sampler to true, or use `data_dispatch: static`"
        )
    return inner
