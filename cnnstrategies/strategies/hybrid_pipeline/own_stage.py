"""The values with which a rank begins: rank 0's; its own stage's alone, where `configure_model` builds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.fixed import known
from cnnstrategies.pipeline.held_in_turn import held_in_turn
from cnnstrategies.pipeline.stage import divide_by_names
from cnnstrategies.pipeline.transport import cpu_group
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.shadow import copy_of_module, same_random_numbers


@dataclass(frozen=True)
class Plan:
    """What `configure_model` builds: a copy of the module with it, on the meta device; its parameters in order."""

    module: LightningModule
    parameters: list[nn.Parameter]


def plan_network(module: LightningModule, device: torch.device) -> Plan | None:
    """What a copy of a module builds in `configure_model`; None for nothing. Random numbers stay as they are."""
    if not is_overridden("configure_model", module):
        return None
    planned: LightningModule = copy_of_module(module)
    with same_random_numbers(device), held_in_turn() as parameters:
        planned.configure_model()
    return Plan(planned.to("meta"), parameters) if parameters else None


def check_plan(request: LayoutRequest, start_method: str) -> None:
    """Refuse what needs the whole network on one rank: cuts to be chosen, or a parent that is to get all weights."""
    where = "the network is built in configure_model, where each rank keeps its own stage's parameters alone"
    if request.cuts is None and request.stage_count > 1:
        raise ConfigurationError(
            f"cuts are chosen by a profile of the whole network, and {where}: name the cuts, or build it in __init__"
        )
    if start_method != "popen":
        raise ConfigurationError(
            f"start_method={start_method!r} brings all weights back to the process that starts the ranks, and {where}: "
            "use start_method popen or torchrun, or build it in __init__"
        )


def refuse_meta(module: LightningModule, path: str) -> None:
    """Refuse a network with a parameter that has no value, by a ConfigurationError."""
    for name, parameter in network_at(module, path).named_parameters():
        if parameter.is_meta:
            place = ".".join(filter(None, (type(module).__name__, path, name)))
            raise ConfigurationError(
                f"{place} is on the meta device and has no value: build the network in "
                "configure_model, in a new module and without torch.device('meta'), where strategy hybrid_pipeline has "
                "each rank keep its own stage's parameters alone"
            )


@contextmanager
def own_stage_alone(
    plan: Plan, module: LightningModule, path: str, request: LayoutRequest, stage: int
) -> Iterator[list[nn.Parameter]]:
    """Inside, `configure_model` builds the network, of which the parameters of other stages end on the meta device.

    Yields:
        The parameters that have been registered; none where a callback has had the network built before.
    """
    planned = network_at(plan.module, path)
    own = set(divide_by_names(planned, request.cuts or []).state[stage])
    others = {id(parameter) for name, parameter in planned.named_parameters() if name not in own}
    elsewhere = {number for number, parameter in enumerate(plan.parameters) if id(parameter) in others}
    with held_in_turn(elsewhere) as parameters:
        yield parameters
    if not parameters:
        return
    network = network_at(module, path)
    if [one.shape for one in parameters] != [one.shape for one in plan.parameters]:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model builds another network each time it is called: it must not "
            "depend on what it has built before, on random numbers or on the rank"
        )
    missing = [name for name, parameter in network.named_parameters() if name in own and parameter.is_meta]
    if missing:
        raise ConfigurationError(
            f"configure_model leaves {path}.{missing[0]} on the meta device: build it without torch.device('meta'), "
            "since each rank keeps its own stage's parameters alone"
        )
    if planned in known:
        known[network] = known[planned]


@torch.no_grad()
def broadcast_weights(network: nn.Module, timeout: timedelta) -> None:
    """Start from rank 0's weights on every rank; a collective."""
    if dist.get_world_size() == 1:
        return
    with cpu_group(timeout) as group:
        for tensor in (*network.parameters(), *network.buffers()):
            whole = tensor.detach().cpu().contiguous()
            dist.broadcast(whole, 0, group=group)
            tensor.copy_(whole)


@torch.no_grad()
def share_stage(pipeline: Pipeline) -> None:
    """Start from the state of the first replica on every replica of a stage; a collective of these."""
    if pipeline.reducer.group is None:
        return
    source = pipeline.placement.ranks(pipeline.place.stage)[0]
    for tensor in (*pipeline.module.parameters(), *pipeline.module.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, source, group=pipeline.reducer.group)
        tensor.copy_(whole)


@contextmanager
def values_alone_to_cpu(module: LightningModule | None) -> Iterator[None]:
    """Inside, ``module.cpu()`` leaves alone what is on the meta device, where torch refuses to move it."""
    if module is None or not any(parameter.is_meta for parameter in module.parameters()):
        yield
        return

    def move() -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.cpu()

    vars(module)["cpu"] = move
    try:
        yield
    finally:
        del vars(module)["cpu"]
