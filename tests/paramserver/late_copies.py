"""A device that copies to and from the host as late as it may."""

from collections import deque

import torch

from cnnstrategies.paramserver.drivers.staging import Copies


class LateEvent:
    """A copy that reads and writes as late as it may, after all that were begun before."""

    def __init__(self, copies: "LateCopies", target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies, self._target, self._source = copies, target, source
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 2:
            self.synchronize()
        return self._asked > 2

    def synchronize(self) -> None:
        while self in self._copies.queue:
            self._copies.queue.popleft().copy()

    def copy(self) -> None:
        self._target.copy_(self._source)


class LateCopies(Copies):
    """A device that does what it is told when it must."""

    def __init__(self) -> None:
        self.queue: deque[LateEvent] = deque()
        self._needed: list[LateEvent] = []

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan)

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        self.queue.append(LateEvent(self, target, source))
        return self.queue[-1]

    def before_use(self, event: LateEvent) -> None:
        self._needed.append(event)

    def compute(self) -> None:
        """The device goes on as far as something waits for copies."""
        for event in self._needed:
            event.synchronize()
        self._needed.clear()
