"""Build networks in ``configure_model`` so that each rank has only the parameters of its own stage.

Each rank first plans the network: a copy of the module builds the network without values, and the cuts show which stage
has which parameter. Then the module itself builds the network by the rules for placed tensors, with each parameter at
its place. Outside of a run, parameters of other stages are on the meta device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings, simplefilter
from weakref import ref

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from cnnstrategies._torch_private import OperationMode, swap_contents, without_modes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.graph_checks import known
from cnnstrategies.pipeline.network_copies import find_copies
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.registration import PlannedParameter, register_at_places
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at, tensors_of
from cnnstrategies.strategies.module_copies import copy_of_module, same_random_numbers


@dataclass(frozen=True)
class NetworkPlan:
    """A network that ``configure_model`` will build.

    Attributes:
        module: A copy of the module with the network, on the meta device.
        path: Path of the network.
        parameters: The parameters in the order in which modules register them.
    """

    module: LightningModule
    path: str
    parameters: list[nn.Parameter]


def plan_network(module: LightningModule, submodule: str | None, device: torch.device) -> NetworkPlan | None:
    """Return the network that a module will build in ``configure_model``; None if the module does not build it there.

    Args:
        module: The module, which does not change.
        submodule: Path of the network; None for the default.
        device: Device whose random numbers stay as they are.

    Raises:
        ConfigurationError: The network has a lazy parameter.
    """
    if not is_overridden("configure_model", module):
        return None
    try:
        planned, parameters = _planned(module, device, without_values=True)
    except Exception:
        # The code that builds the network may read values of parameters.
        planned, parameters = _planned(module, device, without_values=False)
    if not parameters:
        return None
    path = find_network(planned, submodule)
    registered = {id(parameter) for parameter in parameters}
    network = dict(module_at(planned, path).named_parameters())
    if not any(id(parameter) in registered for parameter in network.values()):
        return None
    for name, parameter in network.items():
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{path}.{name} of {type(module).__name__} is a lazy parameter, but a rank builds only its own stage "
                "in configure_model: give the layer its size, or build the network in __init__"
            )
    return NetworkPlan(planned, path, parameters)


def _planned(
    module: LightningModule, device: torch.device, without_values: bool
) -> tuple[LightningModule, list[nn.Parameter]]:
    """Build a network in a copy of a module.

    Args:
        module: The module.
        device: See `plan_network`.
        without_values: Whether parameters are on the meta device from the beginning.
    """
    planned: LightningModule = copy_of_module(module)
    parameters: list[nn.Parameter] = []
    made: dict[int, tuple[ref[nn.Parameter], nn.Parameter]] = {}

    def register(_: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        kept, same = made.get(id(parameter), (None, parameter))
        if kept is not None and kept() is parameter:  # Two modules share the parameter.
            parameter = same
        elif without_values and not parameter.is_meta and not is_lazy(parameter):
            # The original stays as it is, because it may be a parameter of the module that `__init__` has created.
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            made[id(parameter)] = ref(parameter), meta
            parameter = meta
        parameters.append(parameter)
        return parameter

    # torch's annotation is wrong: the hook may return another parameter.
    handle = register_module_parameter_registration_hook(register)  # type: ignore[arg-type]
    try:
        # Loading a checkpoint into parameters without values warns of it.
        with same_random_numbers(device), catch_warnings():
            simplefilter("ignore")
            planned.configure_model()
    finally:
        handle.remove()
    if not without_values:
        created_before = set(module.parameters())
        for parameter in parameters:
            if parameter not in created_before and not parameter.is_meta and not is_lazy(parameter):
                put_on_meta(parameter)
    return planned.to("meta"), parameters


def check_plan(request: LayoutRequest, start_method: str) -> None:
    """Refuse options that need the whole network on one rank.

    Raises:
        ConfigurationError: The cuts are not named, or the process that starts the ranks would get all weights.
    """
    where = "the network is built in configure_model, so that each rank has only the parameters of its own stage"
    if request.cuts is None and request.stage_count > 1:
        raise ConfigurationError(
            f"cuts are chosen by a profile of the whole network, but {where}: name the cuts, or build it in __init__"
        )
    if start_method != "popen":
        raise ConfigurationError(
            f"start_method={start_method!r} brings all weights back to the process that starts the ranks, but {where}: "
            "use start_method popen or torchrun, or build it in __init__"
        )


def refuse_meta(module: LightningModule, path: str) -> None:
    """Refuse a network with a parameter that does not have a value.

    Raises:
        ConfigurationError: A parameter is on the meta device.
    """
    for name, parameter in module_at(module, path).named_parameters():
        if parameter.is_meta:
            place = ".".join(filter(None, (type(module).__name__, path, name)))
            raise ConfigurationError(
                f"{place} is on the meta device and has no value: build the network in configure_model, in a new "
                "module and without torch.device('meta'); each rank then has only the parameters of its own stage"
            )


def stage_tensors(module: LightningModule, network: nn.Module, division: Division) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the names, stages and tensors of a network's parameters and buffers, and of its copies in a module.

    Args:
        module: The module, whose copies of the network may be teachers.
        network: The network, or a network with the same structure as the divided one.
        division: The division.
    """
    for copy in (network, *find_copies(module, network)):
        yield from division.tensors(copy)


@contextmanager
def own_stage_alone(
    plan: NetworkPlan, module: LightningModule, places: Places, placement: Placement, request: LayoutRequest
) -> Iterator[list[torch.Size]]:
    """Return a context in which ``configure_model`` builds a network of which a rank has only its own stage.

    At the end, parameters of other stages are on the meta device. All ranks must enter this context.

    Args:
        plan: The plan of the network.
        module: The module.
        places: The rules of this rank.
        placement: The numbering of the ranks.
        request: The strategy's arguments.

    Yields:
        The shapes of the parameters that have been registered; none if a callback has built the network before.

    Raises:
        ConfigurationError: The network differs from the planned one, or lacks values.
    """
    planned = module_at(plan.module, plan.path)
    division = Division(planned, request.cuts or [])
    ranks = [tuple(sorted(placement.ranks(stage))) for stage in range(division.stages)]
    by_id = {
        id(tensor): PlannedParameter(name, ranks[stage])
        for name, stage, tensor in stage_tensors(plan.module, planned, division)
    }
    # The constructors of recurrent layers would join the memory of all parameters, which foreign ones do not have.
    without_cudnn = torch.backends.cudnn.flags(enabled=False) if torch.cuda.is_available() else nullcontext()
    with (
        without_cudnn,
        register_at_places(places, [by_id.get(id(parameter)) for parameter in plan.parameters]) as shapes,
    ):
        yield shapes
        if not shapes:
            return
        network = module_at(module, plan.path)
        expected = [torch.Size() if is_lazy(parameter) else parameter.shape for parameter in plan.parameters]
        if shapes != expected or _shapes(network) != _shapes(planned):
            raise ConfigurationError(
                f"{type(module).__name__}.configure_model builds a different network each time it is called: it must "
                "not depend on what it has built before, on random numbers or on the rank"
            )
        tensors = [(name, ranks[stage], tensor) for name, stage, tensor in stage_tensors(module, network, division)]
        _settle(places, module, tensors)
    if planned in known:
        known[network] = known[planned]


def _shapes(network: nn.Module) -> Mapping[str, torch.Size]:
    return {name: parameter.shape for name, parameter in network.named_parameters()}


def _settle(places: Places, module: LightningModule, tensors: Sequence[tuple[str, tuple[int, ...], Tensor]]) -> None:
    """Bring each parameter of the stages to its place, put it on the meta device elsewhere, and bring the rest to all.

    A parameter may be elsewhere if its module is a copy of another stage's module.

    Args:
        places: The rules of this rank.
        module: The module.
        tensors: Names, places and tensors of the stages' parameters and buffers.

    Raises:
        ConfigurationError: A parameter of this rank's stage does not have values.
    """
    parameters = [item for item in tensors if isinstance(item[2], nn.Parameter)]
    for name, place, parameter in parameters:
        value: Tensor = parameter
        if places.place_of(parameter) is not None:
            value = places.bring(parameter.detach(), place, f"configure_model: {name}")
        if places.rank not in place:
            put_on_meta(parameter)
        elif parameter.is_meta:
            raise ConfigurationError(
                f"configure_model leaves {name} on the meta device: build it without torch.device('meta'); each rank "
                "then has only the parameters of its own stage"
            )
        elif isinstance(parameter, ForeignTensor):
            give_values(places, parameter, value)
    of_stages = {id(parameter) for _, _, parameter in parameters}
    for name, tensor in list(tensors_of(module)):
        if id(tensor) not in of_stages and places.place_of(tensor) is not None:
            whole = places.everywhere(tensor.detach(), f"configure_model: {name}")
            if isinstance(tensor, ForeignTensor):
                give_values(places, tensor, whole)
            else:
                places.forget(tensor)


def put_others_away(module: LightningModule, places: Places, device: torch.device) -> None:
    """Make the parameters on the meta device foreign, before they get the places of their stages.

    Args:
        module: The module.
        places: The rules of this rank.
        device: Device of this rank, and of the foreign parameters.
    """
    elsewhere = tuple(rank for rank in range(places.world_size) if rank != places.rank)
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            places.put_away(parameter, elsewhere, name, device)


def meta_tensors_stay(module: nn.Module | None) -> AbstractContextManager[object]:
    """Return a context in which a module with parameters on the meta device can be moved to another device."""
    has_meta = module is not None and any(parameter.is_meta for parameter in module.parameters())
    return _MetaTensorsStay() if has_meta else nullcontext()  # type: ignore[no-untyped-call]


class _MetaTensorsStay(OperationMode):  # type: ignore[no-untyped-call]
    """Leaves tensors on the meta device there, where torch refuses to move them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def put_on_meta(parameter: Tensor) -> None:
    """Replace a parameter's values by a tensor on the meta device, in place."""
    with without_modes():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        swap_contents(parameter, nn.Parameter(meta, parameter.requires_grad))


def give_values(places: Places, tensor: Tensor, value: Tensor, is_used: bool = False) -> None:
    """Give a foreign parameter or buffer values, in place.

    Args:
        places: The rules of this rank.
        tensor: The parameter or buffer.
        value: The values, which may share a storage with another tensor.
        is_used: See `swap_contents`.
    """
    with places.local():
        value = value.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        swap_contents(tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value, is_used)
