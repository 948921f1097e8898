"""Applies decided steps to a server's slices."""

from collections import deque

import torch
from torch import Tensor

from cnnstrategies.paramserver.backlog import Backlog
from cnnstrategies.paramserver.clipping import squared_norm
from cnnstrategies.paramserver.decision import Decision
from cnnstrategies.paramserver.pushes import Pushes
from cnnstrategies.paramserver.shard import Shard
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.view import View

EVERYBODY = (0xFFFFFFFF, 0)  # whose update the mean of a step is


class Updater:
    """Forms the means of a step and applies them, slice by slice, in the order of the slices' use.

    Args:
        specification: What all processes of the run agree on.
        shard: The server's slices.
        backlog: The workers' pushes.

    Attributes:
        finished: Steps that are applied to all own slices.
    """

    def __init__(self, specification: Specification, shard: Shard, backlog: Backlog) -> None:
        self.finished = 0
        self._clip_value = specification.clip_value
        self._shard = shard
        self._backlog = backlog
        self._keeps_means = specification.clip_norm is not None or specification.replication > 1
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        self._todo: deque[int] = deque()
        self._alive: set[int] = set()

    def follow(self, view: View) -> None:
        """Wait only for pushes of the workers of a view."""
        self._alive = {worker.id for worker in view.workers}

    def plan(self, decision: Decision | None) -> None:
        """List the slices that the decided step is still to be applied to."""
        versions = self._shard.store.versions
        self._todo = deque(key for key in self._shard.own if decision is not None and versions[key] == decision.step)

    def came(self, key: int) -> None:
        """A push of the decided step has come for a slice."""
        if key not in self._todo:
            self._todo.append(key)

    @property
    def busy(self) -> bool:
        """Whether slices are left to be worked on."""
        return bool(self._todo)

    def work(self, decision: Decision) -> bool:
        """Form the mean of one slice, and apply it if the step's factor is known.

        Returns:
            Whether the slice was there to be worked on.
        """
        key = self._todo.popleft()
        pushes = self._backlog.of(decision.step)
        if self._shard.store.versions[key] != decision.step:
            return False
        if not pushes.has(key, self._present(decision)):
            return False  # A slice taken over from a dead server: its last push brings it back here.
        mean = self._mean(pushes, key, decision.members)
        if decision.scale is None:
            return True
        if mean is not None and self._clip_value is not None:
            mean.clamp_(-self._clip_value, self._clip_value)
        if mean is not None and decision.scale != 1.0:
            mean.mul_(decision.scale)
        self._shard.update(key, mean, decision.options, EVERYBODY, decision.step)
        pushes.drop(key)
        if not self._todo:
            self.finished = self._backlog.lowest(decision.step)
            self._backlog.compare()
        return True

    def squared_norm(self, decision: Decision) -> float | None:
        """The squared norm of this server's part of the mean gradient; None while a push is missing."""
        pushes = self._backlog.of(decision.step)
        present = self._present(decision)
        keys = [key for key in self._shard.own if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, present) for key in keys):
            return None
        return squared_norm([self._mean(pushes, key, decision.members) for key in keys])

    def _present(self, decision: Decision) -> list[int]:
        return [worker for worker in decision.members if worker in self._alive]

    def _mean(self, pushes: Pushes, key: int, members: tuple[int, ...]) -> Tensor | None:
        """The mean of a slice: of all its workers' pushes at once, while it is in the processor's cache.

        Slices share one buffer, unless the means are needed again: to be clipped, or by libzmq to be sent to backups.
        """
        slice_ = self._shard.store.slices[key]
        place = key if self._keeps_means else slice_.dtype
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < slice_.numel:
            buffer = self._buffers[place] = torch.empty(slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[: slice_.numel])
