"""Ranks as threads of one process, of which one runs at a time, with a link in memory.

A rank runs until it waits for a message. Then the next rank that can go on runs. Each rank has random number generators
of its own, which are exchanged when the ranks take turns. A run therefore gives the same result each time. If all ranks
wait, the run fails at once, so no time-out is needed.
"""

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cnnstrategies.placed import Places
from cnnstrategies.placed.messages import LinkError


def generator_states() -> tuple[Any, Any, Any]:
    """Return the states of Python's, torch's and NumPy's random number generators."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def set_generators(states: tuple[Any, Any, Any]) -> None:
    """Set the states of the random number generators."""
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    np.random.set_state(states[2])


class Turns:
    """The ranks of one run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._queues: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._waits_for: dict[int, int] = {}
        self._ended: set[int] = set()
        self._current = 0
        self._generators = [generator_states()] * world_size

    def run(self, function: Callable[[int, "MemoryLink"], Any]) -> tuple[list[Any], list[BaseException | None]]:
        """Return the ranks' results and errors."""
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [None] * self.world_size

        def main(rank: int) -> None:
            self._wait_for_turn(rank)
            try:
                results[rank] = function(rank, MemoryLink(self, rank))
            except BaseException as error:
                errors[rank] = error
            with self._changed:
                self._ended.add(rank)
                self._pass_on(rank)

        outside = generator_states()
        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        set_generators(outside)
        return results, errors

    def put(self, source: int, target: int, message: bytes) -> None:
        self._queues[source, target].append(message)

    def take(self, source: int, target: int) -> bytes:
        queue = self._queues[source, target]
        if not queue:
            with self._changed:
                self._waits_for[target] = source
                self._pass_on(target)
            self._wait_for_turn(target)
            del self._waits_for[target]
        if not queue:
            raise LinkError(f"rank {source} has ended, or waits as well")
        return queue.popleft()

    def _can_go_on(self, rank: int) -> bool:
        if rank in self._ended:
            return False
        return rank not in self._waits_for or bool(self._queues[self._waits_for[rank], rank])

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run that can go on. If none can, the first that has not ended gets an error."""
        self._generators[rank] = generator_states()
        others = [(rank + step) % self.world_size for step in range(1, self.world_size + 1)]
        going = [other for other in others if self._can_go_on(other)]
        left = [other for other in others if other not in self._ended]
        if going or left:
            self._current = (going or left)[0]
            set_generators(self._generators[self._current])
        self._changed.notify_all()

    def _wait_for_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._current == rank)


class MemoryLink:
    """A rank's link to the other threads."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank

    def send(self, target: int, message: bytes) -> None:
        self._turns.put(self._rank, target, message)

    def receive(self, source: int) -> bytes:
        return self._turns.take(source, self._rank)

    def close(self) -> None:
        pass


def on_ranks(world_size: int, function: Callable[[Places], Any]) -> list[Any]:
    """Return the results of ``function(places)`` on each rank, with the rules on. Raise a rank's error."""
    results, errors = outcomes(world_size, function)
    # An error is often the cause of the error of a rank with a smaller number, which then waits in vain.
    for error in sorted(filter(None, errors), key=lambda error: type(error).__name__ == "DivergedError"):
        raise error
    return results


def outcomes(world_size: int, function: Callable[[Places], Any]) -> tuple[list[Any], list[BaseException | None]]:
    """Return the ranks' results and errors."""

    def main(rank: int, link: MemoryLink) -> Any:
        with Places(rank, world_size, link) as places:
            return function(places)

    return Turns(world_size).run(main)
