"""How a worker meets the servers and begins to train: for itself, or with those of its node as one."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.board import Board, SharedMemory, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.services import SPECIFICATION
from cnnstrategies.paramserver.specification import Mode, Specification
from cnnstrategies.paramserver.worker.codecs import ladder
from cnnstrategies.strategies.parameter_server.base import WorkerGroup
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.state import restore_trainer

PAUSE_SECONDS = 1e-4  # between two looks at what others of the node have written
LOOK_SECONDS = 0.02  # between two looks at who lives


@dataclass(frozen=True)
class Start:
    """What a worker begins with.

    Attributes:
        worker: Its connection to the servers.
        specification: What all processes of the run agree on.
        joined: Whether the others were training already, and have let it in.
        own_steps: In mode ``local``, those of the others since the last outer step; 0 if all begin.
    """

    worker: Worker | CombinedWorker
    specification: Specification
    joined: bool
    own_steps: int


def meet_servers(
    group: WorkerGroup,
    options: Options,
    module: LightningModule,
    optimizer: Optimizer,
    nodes: int,
    per_node: int,
    outer_state: Mapping[str, Any] | None,
) -> Start:
    """Agree on the run's specification, and join; a worker that was started again waits until the others let it in."""
    run, membership, trainer = group.collectives, group.membership, module.trainer
    if group.rank == 0:
        clipping = _clipping(trainer, options.mode)
        whole = options.specification(module, optimizer, nodes, group.world_size, **clipping)
        run.put(SPECIFICATION, [whole.to_json().encode()])
    (text,) = run.get(SPECIFICATION)
    specification = Specification.from_json(bytes(text).decode())
    parameters = places(module, specification)
    # From here on the servers know this worker, and admit its keys.
    started = run.start(midway=options.comes_midway)
    connect = partial(connection, membership, specification, parameters)
    worker: Worker | CombinedWorker
    if options.combines(per_node):
        worker = combined_worker(group, per_node, specification, parameters, connect)
    else:
        worker = connect()
    own_steps = 0
    if started.joined:
        state = started.values[started.leader]
        restore_trainer(trainer, optimizer, state)
        if options.data_dispatch == "dynamic":
            run.give_back(trainer.current_epoch)  # Lightning has begun to load another epoch.
        own_steps = int(state["own_steps"])
        notice = f"Rank {group.rank} was started again and goes on in epoch {state['epoch']}"
        print(notice, file=sys.stderr, flush=True)
    else:
        own = optimizer.state_dict() if optimizer.state else None
        served = outer_state if options.mode == "local" else own
        if group.rank == 0:
            worker.initialise(served)
        else:
            worker.stand_in(served)
    worker.join()
    if started.joined and not started.midway:
        run.barrier("admitted")
    if options.mode != "local":
        optimizer.state.clear()  # It is the servers' now.
    return Start(worker, specification, started.joined, own_steps)


def connection(
    membership: Membership,
    specification: Specification,
    parameters: Sequence[Tensor],
    came: Callable[[int, Tensor], None] | None = None,
) -> Worker:
    """That of a member to the servers."""
    address = membership.address
    return Worker(
        specification, parameters, membership.source(), address.id, address.incarnation, membership.keys, came
    )


def places(module: LightningModule, specification: Specification) -> list[Tensor]:
    """Where a worker takes the servers' values: in the parameters, but for those that are frozen.

    These are the module's own: a teacher's weights follow others, though the optimizer was given them.
    """
    named = dict(module.named_parameters())
    trained = [named[info.name] for info in specification.parameters]
    return [one.data if one.requires_grad else one.data.clone() for one in trained]


def _clipping(trainer: Trainer, mode: Mode) -> dict[str, float]:
    value = trainer.gradient_clip_val
    if not value or mode == "local":
        return {}
    by_value = trainer.gradient_clip_algorithm == "value"
    return {"clip_value" if by_value else "clip_norm": float(value)}


def combined_worker(
    group: WorkerGroup,
    per_node: int,
    specification: Specification,
    parameters: Sequence[Tensor],
    connect: Callable[[Callable[[int, Tensor], None]], Worker],
) -> CombinedWorker:
    """Share memory with the other workers of this node; a collective, after training has begun."""
    size = size_of(parameters)
    memory = SharedMemory(size)
    where = group.gather(memory.where, "shared memory")
    first = group.rank // per_node * per_node
    ranks = [rank for rank in range(first, first + per_node) if rank in where and rank != group.rank]
    shared = {group.rank: memory.own, **open_shared(ranks, where, size)}
    group.gather(None, "shared memory is open")
    memory.opened()
    boards = {rank: Board(shared[rank], parameters) for rank in sorted(shared)}
    alive = Alive(group.membership.views.current, boards.keys())
    return CombinedWorker(group.rank, boards, parameters, connect, alive, _pause, ladder(specification)[0])


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


class Alive:
    """Who of a node's workers lives, looked at now and then."""

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
