"""How a worker meets the servers and begins to train."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.services import SPECIFICATION
from cnnstrategies.paramserver.specification import Mode, Specification
from cnnstrategies.strategies.parameter_server.group import WorkerGroup
from cnnstrategies.strategies.parameter_server.nodes import combined_worker
from cnnstrategies.strategies.parameter_server.options import Options
from cnnstrategies.strategies.parameter_server.state import restore_trainer


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
    trainer: Trainer,
    optimizer: Optimizer,
    nodes: int,
    per_node: int,
    outer_state: Mapping[str, Any] | None,
) -> Start:
    """Agree on the run's specification, and join; a worker that was started again waits until the others let it in.

    Args:
        group: The workers of the run.
        options: What the user asks for.
        module: The module that is trained.
        trainer: The trainer; one that was started again is put where the others stand.
        optimizer: The user's. In all modes but ``local`` its state moves to the servers.
        nodes: Nodes of the run.
        per_node: Workers of each.
        outer_state: In mode ``local``, what the outer optimizer goes on with.
    """
    run, membership = group.collectives, group.membership
    if group.rank == 0:
        clipping = _clipping(trainer, options.mode)
        whole = options.specification(module, optimizer, nodes, group.world_size, **clipping)
        run.put(SPECIFICATION, [whole.to_json().encode()])
    (text,) = run.get(SPECIFICATION)
    specification = Specification.from_json(bytes(text).decode())
    parameters = places(module, specification)
    # From here on the servers know this worker, and admit its keys.
    started = run.start(midway=options.comes_midway)
    address = membership.address

    def connect(came: Callable[[int, Tensor], None] | None = None) -> Worker:
        return Worker(
            specification,
            parameters,
            membership.source(),
            address.id,
            address.incarnation,
            membership.keys,
            group.insecure,
            came,
        )

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
