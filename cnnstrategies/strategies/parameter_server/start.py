"""Functions for the start of a worker's training, such as connecting to the servers and restoring progress."""

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
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.shared_state import SharedMemory, SharedState, open_shared, size_of
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.joined_optimizers import members_of
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.optimizers import restored_option
from cnnstrategies.paramserver.specification import Mode, Specification, hyperparameters
from cnnstrategies.paramserver.worker.codecs import ladder
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy

PAUSE_SECONDS = 1e-4  # Time in seconds between two reads of the shared memory of a node's workers.
LOOK_SECONDS = 0.02  # Time in seconds between two checks whether workers of the node have died.
SEED = "PL_GLOBAL_SEED"  # Environment variable in which Lightning stores the seed of `seed_everything`.
# Largest number of bytes that a broadcast sends at once. Heartbeats use the same connection and wait until these bytes
# are sent, which takes 0.8 s over 10 Mbit/s.
PIECE_BYTES = 1 << 20

# Connections to the servers


def join_servers(
    strategy: CoordinatedStrategy, module: LightningModule, optimizer: Optimizer, outer_state: Mapping[str, Any] | None
) -> tuple[Worker | CombinedWorker, Specification, int | None]:
    """Connect this worker to the servers at the start of training. All workers must call this.

    Rank 0 publishes the run's specification. If this worker was restarted while the run was training, the worker waits
    until the run admits it, and takes over the progress of the other workers.

    Args:
        strategy: The strategy, with an open session.
        module: The module that is trained.
        optimizer: The module's optimizer, or its optimizers as one.
        outer_state: State of the outer optimizer of mode ``local`` from a checkpoint; None if there is none.

    Returns:
        The connection to the servers; the run's specification; and None, or a number of steps if this worker was
        restarted. In mode ``local`` the number of steps is that of the other workers since the last outer step. In
        other modes it is 0.
    """
    options, run, trainer = strategy.options, strategy.collectives, module.trainer
    if strategy.global_rank == 0:
        run.put(specification_of(strategy, module, optimizer).to_json())
    # After this call the servers know this worker and accept its keys. With dynamic dispatch, a restarted worker may
    # join in the middle of an epoch.
    started = run.start(midway=options.data_dispatch == "dynamic" and not options.aggregates)
    specification = agreed_specification(strategy)
    if started.joined and specification.number:
        if options.mode == "local":
            raise ConfigurationError(
                f"rank {strategy.global_rank} was restarted after parameters were added to the optimizer, which does "
                "not work with `mode: local`: start the run from its last checkpoint, or use `mode: sync`"
            )
        take_groups(optimizer, module, specification)
    parameters = value_tensors(module, specification)
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
            # Lightning requested batches before this process knew the run's epoch. Batches of another epoch are given
            # back, so that other workers get them.
            run.give_back(trainer.current_epoch)
        own_steps = int(state["own_steps"])
        notice = f"Rank {strategy.global_rank} was restarted and continues in epoch {state['epoch']}"
        print(notice, file=sys.stderr, flush=True)
    else:
        has_state = any(member.state for member in members_of(optimizer))
        optimizer_state = optimizer.state_dict() if has_state else None
        worker.initialise(outer_state if options.mode == "local" else optimizer_state)
    worker.join()
    if started.joined and not started.midway:
        run.barrier("admitted")
    if options.mode != "local":
        for member in members_of(optimizer):
            member.state.clear()  # The servers hold the optimizer's state now, so this copy is not needed.
    return worker, specification, own_steps


def take_groups(optimizer: Optimizer, module: LightningModule, specification: Specification) -> None:
    """Give the optimizer of a restarted worker the parameters that the other workers have added to their optimizers."""
    named = dict(module.named_parameters())
    for number, group in enumerate(specification.groups):
        members = [named[specification.parameters[index].name] for index in group.parameters]
        if number < len(optimizer.param_groups):
            optimizer.param_groups[number]["params"] = members
        else:
            for parameter in members:
                parameter.requires_grad_(True)
            options = {name: restored_option(value) for name, value in group.options.items()}
            optimizer.add_param_group({"params": members, **options})


def specification_of(
    strategy: CoordinatedStrategy, module: LightningModule, optimizer: Optimizer, number: int = 0
) -> Specification:
    """Return the specification for the optimizer's current parameter groups.

    Args:
        strategy: The strategy.
        module: The module that is trained.
        optimizer: The module's optimizer.
        number: Number of the specification.
    """
    options = strategy.options
    changes: dict[str, Any] = {
        "is_joint": strategy.served.is_joint,
        "number": number,
        # Otherwise each worker's gradient is applied by itself, so the worker clips it.
        "clips_each_step": not module.automatic_optimization and options.aggregates,
        **_clipping(module.trainer, options.mode),
    }
    return options.specification(module, optimizer, strategy.num_nodes, strategy.world_size, **changes)


def agreed_specification(strategy: CoordinatedStrategy) -> Specification:
    """Wait until rank 0 has published the run's specification, and return it."""
    return Specification.from_json(strategy.collectives.get())


def connection(
    membership: Membership,
    specification: Specification,
    parameters: Sequence[Tensor],
    on_value: Callable[[int, Tensor], None] | None = None,
) -> Worker:
    """Return the connection of this worker to the servers.

    Args:
        membership: This worker's membership of the run.
        specification: The run's specification.
        parameters: Tensors into which received values are written, in the order of the specification.
        on_value: Function that is called when the value of a parameter has arrived. Its arguments are the parameter's
            index in the specification, and the value. None for no calls.
    """
    address = membership.address
    return Worker(
        specification, parameters, membership.source(), address.id, address.incarnation, membership.keys, on_value
    )


def value_tensors(module: LightningModule, specification: Specification) -> list[Tensor]:
    """Return the tensors into which a worker writes the values from the servers, in the order of the specification.

    A trained parameter's tensor is the parameter's own data. A frozen parameter's tensor is a copy, because the module
    itself may change a frozen parameter: for example, a teacher's weights may follow a student's weights.
    """
    named = dict(module.named_parameters())
    parameters = [named[info.name] for info in specification.parameters]
    return [parameter.data if parameter.requires_grad else parameter.data.clone() for parameter in parameters]


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
    """Return a worker that pushes and pulls together with the other workers of its node, through shared memory.

    All workers must call this at the start of training.

    Args:
        strategy: The strategy, with an open session.
        specification: The run's specification.
        parameters: Tensors into which received values are written, in the order of the specification.
        connect: Function that takes a callback and returns a connection to the servers. The connection calls the
            callback with the index and the value of each parameter that arrives.
    """
    size, this_rank, per_node = size_of(parameters), strategy.global_rank, strategy.num_processes
    memory = SharedMemory(size)
    where = strategy.gather(memory.where, "shared memory")
    first = this_rank // per_node * per_node
    ranks = [rank for rank in range(first, first + per_node) if rank in where and rank != this_rank]
    shared = {this_rank: memory.content, **open_shared(ranks, where, size)}
    strategy.barrier("shared memory is open")
    memory.opened()
    states = {rank: SharedState(shared[rank], parameters) for rank in sorted(shared)}
    alive = Alive(strategy.collectives.membership.views.current, states.keys())
    return CombinedWorker(this_rank, states, parameters, connect, alive, _pause, ladder(specification)[0])


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


class Alive:
    """Function object that returns the ranks of a node's living workers.

    The object reads the membership's view at most once every `LOOK_SECONDS`.

    Args:
        view: Function that returns the current view.
        ranks: Ranks of the node's workers.
    """

    def __init__(self, view: Callable[[], View], ranks: Collection[int]) -> None:
        self._view = view
        self._alive = frozenset(ranks)
        self._next = 0.0

    def __call__(self) -> frozenset[int]:
        """Return the ranks of the node's living workers.

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


# State that the servers do not hold, namely buffers and the trainer's progress


def trainer_state(trainer: Trainer, optimizer: Optimizer, own_steps: int, configuration: str) -> dict[str, Any]:
    """Return a trainer's progress, for workers that the run admits at the beginning of an epoch.

    The parameters and the optimizer's state are left out, because admitted workers receive them from the servers.

    Args:
        trainer: The trainer.
        optimizer: The optimizer, for its hyperparameters.
        own_steps: In mode ``local``, the number of steps since the last outer step.
        configuration: Digest of the run's configuration; empty in a script.
    """
    callbacks = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's callback connector sets it.
        state = callback.state_dict()
        if state and _can_be_sent(state):
            callbacks[callback.state_key] = state
    precision = trainer.precision_plugin.state_dict()
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": callbacks,
        "options": hyperparameters(optimizer),
        "precision": precision if _can_be_sent(precision) else {},  # With 16-mixed, the loss scale.
        "own_steps": own_steps,
        "seed": seed(),
        "configuration": configuration,
    }


def seed() -> str:
    """Return the seed of `seed_everything` as text. The text is empty if no seed is set.

    The order of the samples depends on the seed.
    """
    return os.environ.get(SEED, "")


def restore_trainer(trainer: Trainer, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give a trainer the progress of the other workers, before its first epoch begins.

    Args:
        trainer: The trainer.
        optimizer: The optimizer, which gets the hyperparameters of the other workers.
        state: The result of :func:`trainer_state` on another worker.
    """
    loop = trainer.fit_loop
    if trainer.current_epoch != int(state["epoch"]):
        # If this process has loaded a checkpoint that was saved within an epoch, its loop would continue within that
        # epoch. The next two lines prevent this.
        loop.restarting = False
        loop.on_iteration_done()
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    for progress in (epochs.current, epochs.total):
        progress.ready = progress.started = progress.processed = progress.completed = int(state["epoch"])  # type: ignore[attr-defined]
    total = batches.total
    total.ready = total.started = total.processed = total.completed = int(state["batches"])  # type: ignore[attr-defined]
    epoch = loop.epoch_loop
    automatic, manual = epoch.automatic_optimization.optim_progress.optimizer.step, epoch.manual_optimization
    is_automatic = trainer.lightning_module.automatic_optimization
    step = automatic.total if is_automatic else manual.optim_step_progress.total
    step.ready = step.completed = int(state["global_step"])
    set_batches_that_stepped(trainer, int(state["global_step"]))
    for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(values)
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(state["precision"])
    # The other workers may have just added a parameter group, which this worker's own hooks add as well.
    for group, options in zip(optimizer.param_groups, state["options"], strict=False):
        for name, value in options.items():
            group[name] = restored_option(value)
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
    """Copy the parameters and buffers of rank 0 to all ranks. All ranks must call this."""
    state = (*module.parameters(), *module.buffers())
    flattened = [tensor.detach().reshape(-1) for tensor in state]
    parts = (part for flat in flattened for part in torch.split(flat, PIECE_BYTES // flat.element_size()))
    for piece in _pieces(parts):
        for part, value in zip(piece, strategy.broadcast(piece, 0), strict=True):
            part.copy_(value)
    with torch.no_grad():
        # If a tensor is not contiguous, `flat` is a copy, so the values must be written back into the tensor.
        for tensor, flat in zip(state, flattened, strict=True):
            tensor.copy_(flat.reshape(tensor.shape))


def _pieces(parts: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors into lists that are sent together, and yield these lists.

    The tensors of a list have at most `PIECE_BYTES` bytes in total. The order of the tensors is kept.
    """
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
    """Make the buffers of a module equal on all workers. All workers must call this.

    Each floating-point buffer is replaced by its mean over the workers, and each other buffer, such as a counter, by
    its maximum. Buffers of metrics are left as they are, because metrics combine their states themselves.
    """
    metrics = {id(b) for m in module.modules() if isinstance(m, Metric) for b in m.buffers()}
    buffers = [buffer for buffer in module.buffers() if id(buffer) not in metrics]
    if not buffers or strategy.world_size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for (dtype, _), members in groups.items():
            # All buffers of a dtype are reduced together, because each reduction waits for all workers.
            flat = torch.cat([buffer.flatten() for buffer in members])
            reduced = strategy.reduce(flat, reduce_op="mean" if dtype.is_floating_point else "max")
            parts = reduced.split([buffer.numel() for buffer in members])
            for buffer, part in zip(members, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
