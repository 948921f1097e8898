"""The workers of a node that push as one."""

import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.board import Board, size_of
from cnnstrategies.paramserver.combiner.memory import SharedMemory, open_shared
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.codecs import ladder
from cnnstrategies.strategies.parameter_server.group import WorkerGroup

PAUSE_SECONDS = 1e-4  # between two looks at what others of the node have written
LOOK_SECONDS = 0.02  # between two looks at who lives


def combined_worker(
    group: WorkerGroup,
    per_node: int,
    specification: Specification,
    parameters: Sequence[Tensor],
    connect: Callable[[Callable[[int, Tensor], None]], Worker],
) -> CombinedWorker:
    """Share memory with the other workers of this node; a collective, after training has begun.

    Args:
        group: The workers of the run.
        per_node: Workers of each node, of successive ranks.
        specification: What all processes of the run agree on.
        parameters: The parameters in the specification's order.
        connect: Connects to the servers, given what to call with each parameter that has come, and its value.

    Raises:
        ConfigurationError: A worker of this node shares no memory with this one.
    """
    size = size_of(parameters)
    memory = SharedMemory(size)
    where = group.gather(memory.where, "shared memory")
    first = group.rank // per_node * per_node
    ranks = [rank for rank in range(first, first + per_node) if rank in where and rank != group.rank]
    shared = {group.rank: memory.own, **open_shared(ranks, where, size)}
    group.gather(None, "shared memory is open")
    memory.opened()
    boards = {rank: Board(shared[rank], parameters) for rank in sorted(shared)}
    alive = Alive(group.membership.current, boards.keys())
    return CombinedWorker(group.rank, boards, parameters, connect, alive, _pause, ladder(specification)[0])


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


class Alive:
    """Who of a node's workers lives, looked at now and then.

    Args:
        view: Gives the newest view. Before training has begun views name no workers.
        ranks: Theirs.
    """

    def __init__(self, view: Callable[[], View], ranks: Collection[int]) -> None:
        self._view = view
        self._alive = frozenset(ranks)
        self._next = 0.0

    def __call__(self) -> frozenset[int]:
        """Their ranks.

        Raises:
            RunEnded: The run is over.
        """
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOK_SECONDS
            view = self._view()
            if view.begun:
                self._alive &= {worker.id for worker in view.workers}
        return self._alive
