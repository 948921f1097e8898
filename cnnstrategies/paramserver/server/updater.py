"""Forms the means of a common step and applies them, slice by slice, in the order of the slices' use."""

from collections import deque

import torch
from torch import Tensor

from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.pushes import Backlog, Pushes
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import Who
from cnnstrategies.paramserver.specification import Specification

TOGETHER_BYTES = 1 << 18  # of small slices that are updated together
EVERYBODY = (0xFFFFFFFF, 0)  # whose update the mean of a step is


class Updater:
    """Applies the decided step.

    Attributes:
        finished: Steps that are applied to all own slices.
        lives: The incarnation of each worker of the view: pushes of others do not come again.
    """

    def __init__(self, specification: Specification, shard: Shard, backlog: Backlog) -> None:
        self.finished = 0
        self.lives: dict[int, int] = {}
        self._clip_value = specification.clip_value
        self._may_choose = "auto" in (specification.compression, specification.pull_compression)
        self._shard = shard
        self._backlog = backlog
        self._keeps_means = specification.clip_norm is not None or specification.replication > 1
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        self._todo: deque[int] = deque()
        self._waiting: set[int] = set()  # slices that lack pushes of the decided step
        self._present: list[Who] = []  # the members whose pushes come again if they are not here

    def plan(self, decision: Decision | None) -> None:
        """List the slices that the decided step is still to be applied to."""
        versions = self._shard.store.versions
        self._todo = deque()
        self._waiting = set()
        if decision is None:
            return
        self._present = [(worker, life) for worker, life in decision.who if self.lives.get(worker) == life]
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
        chosen = [pushes.begun[one] for one in sorted(decision.who) if one in pushes.begun] if self._may_choose else []
        pulls, rung = frozenset(begin.pulls for begin in chosen), chosen[0].rung if chosen else 0
        self._shard.update(means, decision.options, EVERYBODY, decision.step, absent, pulls, rung)
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
        """The squared norm, in float64, of this server's part of the mean; None while a push is missing."""
        pushes = self._backlog.of(decision.step)
        keys = [key for key in self._shard.own if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, self._present) for key in keys):
            return None
        means = [self._mean(pushes, key, decision.who, 0) for key in keys]
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64).item() for one in means if one is not None]
        return float(sum(norm * norm for norm in norms))

    def _mean(self, pushes: Pushes, key: int, members: list[Who], start: int) -> Tensor | None:
        """The mean of a slice: of all its workers' pushes at once, while it is in the processor's cache.

        Slices share one buffer, in which it goes to `start`, unless the means are needed again: to be clipped, or by
        libzmq to be sent to backups.
        """
        slice_ = self._shard.store.slices[key]
        place = key if self._keeps_means else slice_.dtype
        start = 0 if self._keeps_means else start
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < start + slice_.numel:
            buffer = self._buffers[place] = torch.empty(start + slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[start : start + slice_.numel])
