"""Reading of a stream by a loader that divides the stream in its own way, such as LitData's ``StreamingDataLoader``."""

from collections.abc import Iterator
from typing import Any

from cnnstrategies.models.samples import count_samples
from cnnstrategies.strategies.streams.part import StreamBatch, StreamPart
from cnnstrategies.strategies.streams.recognition import StreamDivision


class OwnReader:
    """Reader of the batches that a user's loader yields in this process.

    The number of samples of a batch is known when the loader has yielded the batch. A run that resumes continues from
    the loader's own state, if it has one, and needs the same numbers of processes and workers.

    Attributes:
        part: Facts about this process's part of the stream. The loader does not read it.
        loader: The user's loader.
        first: An empty list, because the processes do not compare samples.

    Args:
        loader: The user's loader.
        part: Facts about this process's part of the stream.
    """

    def __init__(self, loader: Any, part: StreamPart) -> None:
        self.loader, self.part = loader, part
        self.first: list[int] = []
        self._has_begun = self._has_state = False

    def start(self, epoch: int) -> Iterator[StreamBatch]:
        """Return an iterator of this process's batches of an epoch."""
        self.part.division = StreamDivision(by_process=True, by_worker=True)
        loader, has_state, is_resumed = self.loader, self._has_state, not self._has_begun
        self._has_begun, self._has_state = True, False
        if not has_state and getattr(loader, "restore", False):
            # LitData's loader begins a new epoch only if the epoch before was asked for a batch after the last one.
            # Lightning does not ask if it knows the number of batches.
            loader.restore = False
        if is_resumed and not has_state and isinstance(getattr(loader, "current_epoch", None), int):
            loader.current_epoch = epoch  # LitData's loader adds 1.
        return self._batches()

    def load_state_dict(self, state: Any) -> None:
        """Continue in the next epoch from a state of the loader."""
        self.loader.load_state_dict(state)
        self._has_state = True

    def restart(self) -> None:
        """Do nothing. The loader starts its workers itself."""

    def any_batch(self) -> Any:
        """Return a batch that does not belong to the current epoch, or None if the loader has none."""
        loader = self.loader
        epoch = getattr(loader, "current_epoch", None)
        batch = next(iter(loader), None)
        if epoch is not None:
            loader.current_epoch = epoch  # LitData's loader has begun the next epoch.
        return batch

    def _batches(self) -> Iterator[StreamBatch]:
        for batch in self.loader:
            yield StreamBatch(batch, (count_samples(batch) or 1,))
