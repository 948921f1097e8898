"""What the servers do not hold, as all workers have it: buffers, and where a trainer stands."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from cnnstrategies._lightning_private import set_batches_that_stepped
from cnnstrategies.codec import CodecError, encode
from cnnstrategies.paramserver.specification import hyperparameters
from cnnstrategies.strategies.parameter_server.base import WorkerGroup

SEED = "PL_GLOBAL_SEED"  # Lightning's: the order of the samples follows from it
PIECE_BYTES = 1 << 20  # 0.8 s over 10 Mbit/s: signs of life go the same way, and stand behind what was sent before


def trainer_state(trainer: Trainer, optimizer: Optimizer, own_steps: int) -> dict[str, Any]:
    """Where training stands, at the first batch of an epoch: counters, schedulers, callbacks, learning rates.

    The parameters and the optimizer's state are the servers'.

    Args:
        trainer: The trainer.
        optimizer: The user's.
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


def take_state_of_rank_zero(module: nn.Module, group: WorkerGroup) -> None:
    """Start from rank 0's parameters and buffers on every rank; they come in pieces."""
    state = (*module.parameters(), *module.buffers())
    flat = [tensor.detach().reshape(-1) for tensor in state]
    for piece in _pieces(part for one in flat for part in torch.split(one, PIECE_BYTES // one.element_size())):
        for part, value in zip(piece, group.broadcast(piece if group.rank == 0 else [], 0), strict=True):
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


def average_buffers(module: nn.Module, group: WorkerGroup) -> None:
    """Replace floating-point buffers by their mean over the workers, others by their maximum; not those of metrics."""
    metrics = {id(b) for m in module.modules() if isinstance(m, Metric) for b in m.buffers()}
    buffers = [buffer for buffer in module.buffers() if id(buffer) not in metrics]
    if not buffers or group.world_size == 1:
        return
    values = group.gather(buffers, "buffers")
    with torch.no_grad():
        for index, buffer in enumerate(buffers):
            stacked = torch.stack([values[rank][index] for rank in sorted(values)])
            buffer.copy_(stacked.mean(0) if buffer.is_floating_point() else stacked.amax(0))
