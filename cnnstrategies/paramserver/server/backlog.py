"""What a server has of the common steps that are not applied to all its slices yet."""

from collections.abc import Iterator

from cnnstrategies.paramserver.messages import Header, InvalidMessageError
from cnnstrategies.paramserver.server.pushes import Begin, Pushes, Who
from cnnstrategies.paramserver.server.shard import Shard


class Backlog:
    """The workers' pushes of the present step and the next.

    Args:
        shard: The server's slices.

    Attributes:
        uneven: Whether some own slices may have had the present step and others not, after a server's death.
    """

    def __init__(self, shard: Shard) -> None:
        self.uneven = False
        self._shard = shard
        self._steps: dict[int, Pushes] = {}

    @property
    def steps(self) -> int:
        """How many steps there are pushes of."""
        return len(self._steps)

    def lowest(self, default: int) -> int:
        """The first step that is not applied to all own slices; without own slices the default."""
        return min((self._shard.store.versions[key] for key in self._shard.own), default=default)

    def of(self, step: int) -> Pushes:
        """The pushes of a step."""
        return self._steps.setdefault(step, Pushes())

    def add(self, worker: Who, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push; whether it is new.

        Raises:
            InvalidMessageError: No step was begun for it, or the payload does not fit.
        """
        key, step = header.key, header.step
        version = self._shard.store.versions[key]
        if version > step:
            return False
        if version < 0 or step > version + 1 or step not in self._steps or worker not in self._steps[step].begun:
            raise InvalidMessageError("a push of a step that has not begun")
        return self._steps[step].add(worker, self._shard.store.slices[key], payload, header.encoding, header.base)

    def has(self, worker: Who, step: int, key: int) -> bool:
        """Whether a worker's push of a slice is here."""
        return step in self._steps and self._steps[step].has(key, (worker,))

    def begin(self, worker: Who, step: int, begin: Begin) -> None:
        """Keep what comes before a worker's pushes of a step."""
        self.of(step).begun.setdefault(worker, begin)

    def complete(self, step: int, worker: Who) -> bool:
        """Whether a worker's pushes of a step are all here that this server has a use for."""
        pushes = self._steps[step]
        if pushes.count(worker) == len(self._shard.own):
            return True
        versions = self._shard.store.versions
        return (
            self.uneven
            and worker in pushes.begun
            and all(versions[key] > step or pushes.has(key, (worker,)) for key in self._shard.own)
        )

    def all_complete(self) -> Iterator[tuple[int, Who]]:
        """Steps with workers whose pushes of that step are all here."""
        for step, pushes in self._steps.items():
            for worker in pushes.begun:
                if self.complete(step, worker):
                    yield step, worker

    def all_begun(self) -> Iterator[tuple[int, Who]]:
        """Steps with workers that have begun them."""
        for step, pushes in self._steps.items():
            for worker in pushes.begun:
                yield step, worker

    def compare(self) -> None:
        """After a change of the view: look whether the own slices have had the same steps."""
        self.uneven = len({self._shard.store.versions[key] for key in self._shard.own}) > 1

    def forget_before(self, step: int) -> None:
        """Drop the pushes of earlier steps."""
        for old in [old for old in self._steps if old < step]:
            del self._steps[old]
