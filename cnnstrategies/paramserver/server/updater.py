"""Keeps what workers push of common steps, and applies decided steps to a server's slices."""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import Header, InvalidMessageError
from cnnstrategies.paramserver.server.decision import Decision, squared_norm
from cnnstrategies.paramserver.server.pushes import NOTHING_CHOSEN, Begin, Pushes, Who
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.specification import Specification


class Backlog:
    """The workers' pushes of the present step and the next.

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


TOGETHER_BYTES = 1 << 18  # of small slices that are updated together
EVERYBODY = (0xFFFFFFFF, 0)  # whose update the mean of a step is


class Updater:
    """Forms the means of a step and applies them, slice by slice, in the order of the slices' use.

    Attributes:
        finished: Steps that are applied to all own slices.
    """

    def __init__(self, specification: Specification, shard: Shard, backlog: Backlog) -> None:
        self.finished = 0
        self._clip_value = specification.clip_value
        self._may_choose = "auto" in (specification.compression, specification.pull_compression)
        self._shard = shard
        self._backlog = backlog
        self._keeps_means = specification.clip_norm is not None or specification.replication > 1
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        self._todo: deque[int] = deque()
        self._waiting: set[int] = set()  # slices that lack pushes of the decided step
        self._present: list[Who] = []  # the members whose pushes come again if they are not here
        self._lives: dict[int, int] = {}

    def follow(self, view: View) -> None:
        """Wait only for pushes of the workers of a view."""
        self._lives = view.lives

    def plan(self, decision: Decision | None) -> None:
        """List the slices that the decided step is still to be applied to."""
        versions = self._shard.store.versions
        self._todo = deque()
        self._waiting = set()
        if decision is None:
            return
        self._present = [(worker, life) for worker, life in decision.who if self._lives.get(worker) == life]
        pushes = self._backlog.of(decision.step)
        for key in self._shard.own:
            if versions[key] == decision.step:
                if pushes.has(key, self._present):
                    self._todo.append(key)
                else:
                    self._waiting.add(key)

    def came(self, key: int, step: int) -> None:
        """A push of the decided step has come for a slice."""
        if key in self._waiting and self._backlog.of(step).has(key, self._present):
            self._waiting.discard(key)
            self._todo.append(key)

    @property
    def busy(self) -> bool:
        """Whether slices are left to be worked on."""
        return bool(self._todo)

    def work(self, decision: Decision) -> bool:
        """Form the means of one large slice or of some small ones, and apply them if the step's factor is known.

        Returns:
            Whether there was a slice to be worked on.
        """
        pushes = self._backlog.of(decision.step)
        keys = self._next(decision.step)
        if not keys:
            return False
        means: dict[int, Tensor | None] = {}
        start = 0
        for key in keys:
            means[key] = self._mean(pushes, key, decision.who, start)
            start += self._shard.store.slices[key].numel
        if decision.scale is None:
            return True
        for mean in means.values():
            if mean is not None and self._clip_value is not None:
                mean.clamp_(-self._clip_value, self._clip_value)
            if mean is not None and decision.scale != 1.0:
                mean.mul_(decision.scale)
        absent = {key: lacking for key in keys if (lacking := pushes.absent(key, decision.who))}
        chosen = pushes.chosen(decision.who) if self._may_choose else NOTHING_CHOSEN
        self._shard.update(means, decision.options, EVERYBODY, decision.step, absent, chosen)
        for key in keys:
            pushes.drop(key)
        if not self._todo and not self._waiting:
            self.finished = self._backlog.lowest(decision.step)
            self._backlog.compare()
        return True

    def _next(self, step: int) -> list[int]:
        """The next slices that are there to be worked on."""
        store = self._shard.store
        keys: list[int] = []
        size = 0
        while self._todo and (not keys or size + store.slices[self._todo[0]].nbytes <= TOGETHER_BYTES):
            key = self._todo.popleft()
            if store.versions[key] == step:
                keys.append(key)
                size += store.slices[key].nbytes
        return keys

    def squared_norm(self, decision: Decision) -> float | None:
        """The squared norm of this server's part of the mean gradient; None while a push is missing."""
        pushes = self._backlog.of(decision.step)
        keys = [key for key in self._shard.own if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, self._present) for key in keys):
            return None
        return squared_norm([self._mean(pushes, key, decision.who, 0) for key in keys])

    def _mean(self, pushes: Pushes, key: int, members: list[Who], start: int) -> Tensor | None:
        """The mean of a slice: of all its workers' pushes at once, while it is in the processor's cache.

        Slices share one buffer, unless the means are needed again: to be clipped, or by libzmq to be sent to backups.

        Args:
            pushes: The step's.
            key: The slice.
            members: Who makes up the step.
            start: Where in the shared buffer the mean goes.
        """
        slice_ = self._shard.store.slices[key]
        place = key if self._keeps_means else slice_.dtype
        start = 0 if self._keeps_means else start
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < start + slice_.numel:
            buffer = self._buffers[place] = torch.empty(start + slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[start : start + slice_.numel])
