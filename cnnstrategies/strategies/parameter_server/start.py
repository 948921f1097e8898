"""How a worker begins to train: with the state of rank 0, the servers, and where the others stand."""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from cnnstrategies._lightning_private import set_batches_that_stepped
from cnnstrategies.codec import CodecError, encode
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.shared_state import SharedMemory, SharedState, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.specification import Mode, Specification, hyperparameters
from cnnstrategies.paramserver.worker.codecs import ladder
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy

PAUSE_SECONDS = 1e-4  # between two looks at what others of the node have written
LOOK_SECONDS = 0.02  # between two looks at who lives
SEED = "PL_GLOBAL_SEED"  # Lightning's: the order of the samples follows from it
PIECE_BYTES = 1 << 20  # 0.8 s over 10 Mbit/s: signs of life go the same way, and stand behind what was sent before

# The servers


def meet_servers(
    strategy: CoordinatedStrategy, module: LightningModule, optimizer: Optimizer, outer_state: Mapping[str, Any] | None
) -> tuple[Worker | CombinedWorker, Specification, int | None]:
    """Agree on the run's specification, and join; a worker that was started again waits until the others let it in.

    Args:
        outer_state: In mode ``local``, the outer optimizer's from a checkpoint.

    Returns:
        The connection to the servers, what all processes of the run agree on, and, where the others were training
        already and have let this one in, their steps since the last outer one (in mode ``local``); None if all begin.
    """
    options, run, trainer = strategy.options, strategy.collectives, module.trainer
    if strategy.global_rank == 0:
        clipping = _clipping(trainer, options.mode)
        whole = options.specification(module, optimizer, strategy.num_nodes, strategy.world_size, **clipping)
        run.put(whole.to_json())
    specification = agreed_specification(strategy)
    parameters = places(module, specification)
    # From here on the servers know this worker, and admit its keys.
    # Where batches are given out, who was started again finds some in the middle of an epoch.
    started = run.start(midway=options.data_dispatch == "dynamic" and not options.aggregates)
    connect = partial(connection, run.membership, specification, parameters)
    worker: Worker | CombinedWorker
    if options.combines(strategy.num_processes):
        worker = combined_worker(strategy, specification, parameters, connect)
    else:
        worker = connect()
    own_steps = None
    if started.joined:
        state = started.values[started.leader]
        restore_trainer(trainer, optimizer, state)
        if options.data_dispatch == "dynamic":
            run.give_back(trainer.current_epoch)  # Lightning has begun to load another epoch.
        own_steps = int(state["own_steps"])
        notice = f"Rank {strategy.global_rank} was started again and goes on in epoch {state['epoch']}"
        print(notice, file=sys.stderr, flush=True)
    else:
        own = optimizer.state_dict() if optimizer.state else None
        worker.initialise(outer_state if options.mode == "local" else own)
    worker.join()
    if started.joined and not started.midway:
        run.barrier("admitted")
    if options.mode != "local":
        optimizer.state.clear()  # It is the servers' now.
    return worker, specification, own_steps


def agreed_specification(strategy: CoordinatedStrategy) -> Specification:
    """That of the run, once rank 0 has told it."""
    return Specification.from_json(strategy.collectives.get())


def connection(
    membership: Membership,
    specification: Specification,
    parameters: Sequence[Tensor],
    on_arrival: Callable[[int, Tensor], None] | None = None,
) -> Worker:
    """That of a member to the servers."""
    address = membership.address
    return Worker(
        specification, parameters, membership.source(), address.id, address.incarnation, membership.keys, on_arrival
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
    strategy: CoordinatedStrategy,
    specification: Specification,
    parameters: Sequence[Tensor],
    connect: Callable[[Callable[[int, Tensor], None]], Worker],
) -> CombinedWorker:
    """Share memory with the other workers of this node; a collective, after training has begun."""
    size, own, per_node = size_of(parameters), strategy.global_rank, strategy.num_processes
    memory = SharedMemory(size)
    where = strategy.gather(memory.where, "shared memory")
    first = own // per_node * per_node
    ranks = [rank for rank in range(first, first + per_node) if rank in where and rank != own]
    shared = {own: memory.own, **open_shared(ranks, where, size)}
    strategy.barrier("shared memory is open")
    memory.opened()
    boards = {rank: SharedState(shared[rank], parameters) for rank in sorted(shared)}
    alive = Alive(strategy.collectives.membership.views.current, boards.keys())
    return CombinedWorker(own, boards, parameters, connect, alive, _pause, ladder(specification)[0])


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


# What the servers do not hold: buffers, and where a trainer stands


def trainer_state(trainer: Trainer, optimizer: Optimizer, own_steps: int) -> dict[str, Any]:
    """Where training stands, at the first batch of an epoch; parameters and the optimizer's state are the servers'.

    Args:
        own_steps: In mode ``local``, those since the last outer step: a newcomer counts on from there.
    """
    callbacks = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by the callback connector
        state = callback.state_dict()
        if state and _can_be_sent(state):
            callbacks[callback.state_key] = state
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": callbacks,
        "options": hyperparameters(optimizer),
        "own_steps": own_steps,
        "seed": seed(),
    }


def seed() -> str:
    """What `seed_everything` was given, from which the order of the samples follows; empty if nothing."""
    return os.environ.get(SEED, "")


def restore_trainer(trainer: Trainer, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put a trainer that is about to begin its first epoch where the others stand."""
    loop = trainer.fit_loop
    if trainer.current_epoch != int(state["epoch"]):
        loop.restarting = False  # Else it would go on with batches of the epoch whose checkpoint it has loaded.
        loop.on_iteration_done()
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    for progress in (epochs.current, epochs.total):
        progress.ready = progress.started = progress.processed = progress.completed = int(state["epoch"])  # type: ignore[attr-defined]
    total = batches.total
    total.ready = total.started = total.processed = total.completed = int(state["batches"])  # type: ignore[attr-defined]
    step = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    step.ready = step.completed = int(state["global_step"])
    set_batches_that_stepped(trainer, int(state["global_step"]))
    for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(values)
    for group, options in zip(optimizer.param_groups, state["options"], strict=True):
        for name, value in options.items():
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])


def _can_be_sent(state: Any) -> bool:
    try:
        encode(state)
    except CodecError:
        return False
    return True


def take_state_of_rank_zero(module: nn.Module, strategy: CoordinatedStrategy) -> None:
    """Start from rank 0's parameters and buffers on every rank; they come in pieces."""
    state = (*module.parameters(), *module.buffers())
    flat = [tensor.detach().reshape(-1) for tensor in state]
    for piece in _pieces(part for one in flat for part in torch.split(one, PIECE_BYTES // one.element_size())):
        for part, value in zip(piece, strategy.broadcast(piece, 0), strict=True):
            part.copy_(value)
    with torch.no_grad():
        for tensor, one in zip(state, flat, strict=True):  # Of what is not contiguous the flat one is a copy.
            tensor.copy_(one.reshape(tensor.shape))


def _pieces(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that are sent together."""
    piece: list[Tensor] = []
    size = 0
    for part in parts:
        if piece and size + part.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(part)
        size += part.nbytes
    if piece:
        yield piece


def average_buffers(module: nn.Module, strategy: CoordinatedStrategy) -> None:
    """Replace floating-point buffers by their mean over the workers, others by their maximum; not those of metrics."""
    metrics = {id(b) for m in module.modules() if isinstance(m, Metric) for b in m.buffers()}
    buffers = [buffer for buffer in module.buffers() if id(buffer) not in metrics]
    if not buffers or strategy.world_size == 1:
        return
    values = strategy.gather(buffers, "buffers")
    with torch.no_grad():
        for index, buffer in enumerate(buffers):
            stacked = torch.stack([values[rank][index] for rank in sorted(values)])
            buffer.copy_(stacked.mean(0) if buffer.is_floating_point() else stacked.amax(0))
