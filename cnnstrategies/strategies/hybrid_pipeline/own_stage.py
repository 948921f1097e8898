"""The values with which a rank begins: rank 0's; its own stage's alone, where `configure_model` builds them.

Of the parameters that belong elsewhere one at a time has values, so that memory need not hold the network.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import OperationMode
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.fixed import known
from cnnstrategies.pipeline.stage import divide
from cnnstrategies.pipeline.transport import cpu_group
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.shadow import copy_of_module, same_random_numbers

_OVERWRITES = ("zero_", "fill_")  # Beside those that draw.


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

    Yields those that have been registered; none where a callback has had the network built before.
    """
    planned = network_at(plan.module, path)
    own = set(divide(planned, request.cuts or []).state[stage])
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


def broadcast_weights(network: nn.Module, timeout: timedelta) -> None:
    """Start from rank 0's weights on every rank; a collective."""
    if dist.get_world_size() == 1:
        return
    with cpu_group(timeout) as group:
        _share(network, 0, group, torch.device("cpu"))


def share_stage(pipeline: Pipeline) -> None:
    """Start from the state of the first replica on every replica of a stage; a collective of these."""
    if pipeline.reducer.group is None:
        return
    source = pipeline.placement.ranks(pipeline.place.stage)[0]
    _share(pipeline.module, source, pipeline.reducer.group, pipeline.device)


@torch.no_grad()
def _share(module: nn.Module, source: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        whole = tensor.detach().to(device).contiguous()
        dist.broadcast(whole, source, group=group)
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


@contextmanager
def held_in_turn(elsewhere: Container[int] | None = None) -> Iterator[list[nn.Parameter]]:
    """Have modules that are built inside hold the memory of some of their parameters alone.

    All are initialised as ever, so that the same random numbers are drawn for those that are kept; the memory of one
    that belongs elsewhere is given back as soon as another is written, and at the end it is on the meta device.

    Args:
        elsewhere: Those that belong elsewhere, by their numbers in the order in which modules register them; by
            default all, and what is computed from their values is nobody's.
    """
    turns = Turns(elsewhere)
    handle = register_module_parameter_registration_hook(turns.register)
    try:
        with turns:
            yield turns.parameters
    finally:
        handle.remove()
    turns.put_on_meta()


class Turns(OperationMode):  # type: ignore[no-untyped-call]
    """See :func:`held_in_turn`."""

    def __init__(self, elsewhere: Container[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters: list[nn.Parameter] = []
        self._places: list[tuple[nn.Module, str]] = []  # of the parameters
        self._elsewhere = elsewhere
        # By its id the storage of each parameter that belongs elsewhere, its bytes, and whose it is.
        self._known: dict[int, tuple[torch.UntypedStorage, int, str]] = {}
        self._held: set[int] = set()
        self._right: set[int] = set()  # Those whose values are what the network's own code has made them.

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Take note of a parameter."""
        number = len(self.parameters)
        self.parameters.append(parameter)
        self._places.append((module, name))
        storage = parameter.untyped_storage()
        is_its_own = not parameter.is_meta and storage.resizable() and storage.nbytes() == parameter.nbytes
        if is_its_own and (self._elsewhere is None or number in self._elsewhere):
            self._known[id(storage)] = storage, parameter.nbytes, f"{type(module).__name__}.{name}"
            self._right.add(id(storage))
            self.hold({id(storage)})

    def put_on_meta(self) -> None:
        """Leave shape and type alone of what belongs elsewhere."""
        made: dict[nn.Parameter, nn.Parameter] = {}  # One may be registered in several places.
        for number, (parameter, (module, name)) in enumerate(zip(self.parameters, self._places, strict=True)):
            if self.is_elsewhere(parameter):
                without = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                self.parameters[number] = made.setdefault(parameter, without)
                if dict(module.named_parameters(recurse=False)).get(name) is parameter:
                    module.register_parameter(name, self.parameters[number])

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether its memory is given back."""
        return id(tensor.untyped_storage()) in self._known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        touched = self._storages((args, kwargs))
        if not touched:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        target = self._storages(args[:1])
        if name == "copy_" and target:
            self._right -= target
            return args[0]  # What a mapped checkpoint has for others is not even read.
        self.hold(touched)
        result = func(*args, **kwargs)
        if args and result is args[0]:
            overwrites = name in _OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags
            if overwrites and result.nbytes == result.untyped_storage().nbytes():
                self._right |= target
            read = touched - target
        else:
            leaves = tree_leaves(result)
            is_view = all(isinstance(leaf, Tensor) and self.is_elsewhere(leaf) for leaf in leaves)
            read = set() if is_view or name.startswith("new_") or name.endswith("_like") else touched
        if self._elsewhere is not None and (gone := read - self._right):
            raise ConfigurationError(
                f"{self._known[gone.pop()][2]} is of another rank's stage, and its values are used for something "
                f"else ({name}) when the network is built in configure_model, where each rank keeps its own stage's "
                "alone: build the network in __init__"
            )
        return result

    def _storages(self, values: Any) -> set[int]:
        """Which of those that belong elsewhere are in nested containers."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return {id(tensor.untyped_storage()) for tensor in tensors if self.is_elsewhere(tensor)}

    def hold(self, touched: set[int]) -> None:
        """Have memory for some, by the ids of their storages, and give that of the others back."""
        for key in self._held - touched:
            self._known[key][0].resize_(0)
            self._right.discard(key)
        for key in touched - self._held:
            storage, size, _ = self._known[key]
            storage.resize_(size)
        self._held = touched
