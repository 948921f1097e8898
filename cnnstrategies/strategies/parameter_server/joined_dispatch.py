"""Which batches a process works on that joins a run."""

from typing import Protocol

from lightning.pytorch import Trainer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.chunks import Chunk
from cnnstrategies.strategies.parameter_server.joiner import JoinerGroup
from cnnstrategies.strategies.parameter_server.loader import BatchDispatch, DispatchedLoader


class Visitor(Protocol):
    """Who comes and goes.

    Attributes:
        group: The run's processes.
        leaving: Whether it was told to leave.
    """

    group: JoinerGroup
    leaving: bool

    @property
    def is_in(self) -> bool:
        """Whether it takes part in an epoch."""

    def enter(self) -> None:
        """Wait to be let in, and for a first batch."""


class JoinedDispatch(BatchDispatch):
    """Takes batches while it is in the run, and none from when it is told to leave.

    Args:
        visitor: Whose.
    """

    def __init__(self, visitor: Visitor) -> None:
        super().__init__(visitor.group)
        self._visitor = visitor
        self.first: Chunk | None = None  # It was taken to see whether there is one.
        self._rests = False

    @override
    def loader(self, dataloader: object, trainer: Trainer) -> DispatchedLoader:
        def epoch() -> int:
            if not self._visitor.is_in:
                self._visitor.enter()
                # Lightning begins to iterate before training, and once more in an epoch that is not the first.
                self._rests = trainer.current_epoch > 0
            else:
                self._rests = False
            return trainer.current_epoch

        super().loader(dataloader, trainer)  # Refuses what cannot be given out.
        return DispatchedLoader(dataloader, epoch, self._begin, self._take, self._progress)

    @override
    def _begin(self, epoch: int, batches: int, done: str) -> None:
        if self._rests:
            return
        self.seen = self.processed = 0
        theirs = self._group.collectives.begin_epoch(epoch, batches, 1)
        if theirs not in (0, batches):
            raise ConfigurationError(
                f"an epoch of the run has {theirs} batches and of this configuration {batches}: batches are given out "
                "by their number, so give the run's own data and batch size"
            )

    @override
    def _progress(self, epoch: int) -> str:
        return ""  # It saves nothing.

    @override
    def _take(self, epoch: int) -> Chunk:
        if self._rests:
            return Chunk(epoch, 0, 0)
        first, self.first = self.first, None
        if first is not None:
            return first
        return Chunk(epoch, 0, 0) if self._visitor.leaving else super()._take(epoch)
