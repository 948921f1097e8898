"""Refuse networks and layouts that cannot be divided, before processes are started."""

from collections.abc import Callable
from contextlib import suppress
from types import NoneType

import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.microbatches import Images
from cnnstrategies.pipeline.network_copies import CopiedForward
from cnnstrategies.pipeline.rehearsal import REHEARSED, refusal, rehearse, rehearsed
from cnnstrategies.pipeline.stage import check_cuts
from cnnstrategies.pipeline.timetable import Placement, check_layout
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from cnnstrategies.placed import ForeignTensor
from cnnstrategies.strategies.hybrid_pipeline.compiling import compile_backend_of
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import is_attached
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.network import DividedForward, module_at

COMPILE_STAGES = (
    "strategy hybrid_pipeline cuts the network before it is compiled: leave out torch.compile, and let the callback "
    "ComputeSettings(compile_backend='inductor') compile each stage, or use strategy ddp"
)


def check_devices(device: torch.device, backend: str | None, syncs_batch_norm: bool) -> None:
    """Refuse options of a run that contradict the strategy.

    Args:
        device: Device of this rank.
        backend: Backend of the process group; None for the default.
        syncs_batch_norm: Whether the trainer's option ``sync_batchnorm`` is set.

    Raises:
        ConfigurationError: An option cannot be used.
    """
    if syncs_batch_norm:
        raise ConfigurationError(
            "sync_batchnorm=True: the stages of a pipeline run different microbatches; set trainer.sync_batchnorm "
            "to false"
        )
    if device.type == "cuda" and backend == "gloo":
        raise ConfigurationError(
            "process_group_backend=gloo: gloo sends no messages from one GPU to another; leave it out for NCCL"
        )


def check_state(module: LightningModule, path: str) -> None:
    """Refuse a module that is compiled as a whole, or that has lost parameters in an earlier run.

    Parts of the network may be compiled. The module and the network may not, because torch does not compile code that
    follows the rules for placed tensors, and the user would not notice it.

    Args:
        module: The module.
        path: Path of the divided network.

    Raises:
        ConfigurationError: The module cannot be divided, or its ``compile_backend`` does not work for stages.
    """
    compile_backend_of(module)
    _check_shapes(module)
    name = type(module).__name__
    if is_compiled_whole(module) or is_compiled(module):
        raise ConfigurationError(f"{name} is compiled: {COMPILE_STAGES}")
    if is_compiled(module_at(module, path)):
        raise ConfigurationError(f"{name}.{path} is compiled: {COMPILE_STAGES}")
    if any(isinstance(tensor, ForeignTensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigurationError(
            f"parts of {name}.{path} are gone: an earlier run with strategy hybrid_pipeline has failed and left each "
            "rank its own stage alone; create the module again, and continue from the last checkpoint"
        )


def check_forward(network: nn.Module) -> None:
    """Refuse a network whose parameters have no shapes, or whose forward is not that of its class.

    Raises:
        ConfigurationError: The network is refused.
    """
    _check_shapes(network)
    if not isinstance(vars(network).get("forward"), (DividedForward, CopiedForward, NoneType)):
        raise ConfigurationError(
            f"{type(network).__name__}: the network's forward was replaced by an assignment, but a pipeline divides "
            "the forward of the network's class: define the forward in a subclass"
        )


def _check_shapes(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"{name} gets its shape in the first forward, but a pipeline has to know all shapes: call the layer "
                "once with an example in __init__ or configure_model"
            )


def placement_for(request: LayoutRequest, microbatches: int, devices: int) -> Placement:
    """Return the numbering of the ranks. One microbatch runs on the first replica of each stage."""
    if microbatches == 1:
        microbatches = max(request.replicas_on(devices))
    return request.placement_on(devices, microbatches)


def check_stages(
    module: LightningModule,
    example: Callable[[int], Images | None],
    broadcast: Callable[[str | None], str | None],
    division: Division,
) -> None:
    """Refuse stages that do not compute what the network computes. Rank 0 compares, and all ranks must call this.

    Args:
        module: The module.
        example: Function that returns example images; None if they are not known.
        broadcast: Function that returns the value of rank 0.
        division: The division of the network.

    Raises:
        ConfigurationError: The stages compute something else.
    """
    reason: str | None = None
    has_all = not any(p.is_meta or isinstance(p, ForeignTensor) for p in division.network.parameters())
    if module.trainer.is_global_zero and has_all:
        with suppress(Exception):  # Without an example there is no comparison.
            images = example(REHEARSED)
            reason = None if images is None else rehearse(division, module, rehearsed(images))
    if (reason := broadcast(reason)) is not None:
        raise refusal(division.network, reason)


def check_layout_of(
    request: LayoutRequest, network: nn.Module, devices: int, example: Callable[[int], Images | None]
) -> bool:
    """Check that a network can be cut into the requested stages.

    Args:
        request: The strategy's options.
        network: The network.
        devices: Number of devices.
        example: Function that returns example images; see `decide_by_shapes`.

    Returns:
        Whether everything is checked. If not, the network needs example images or the trainer, which do not exist yet.

    Raises:
        ConfigurationError: The layout does not fit the devices or the network.
    """
    placement = placement_for(request, request.microbatches_on(devices, network), devices)
    check_layout(request.stage_count - 1, placement, devices)
    check_forward(network)
    if isinstance(network, LightningModule) and not is_attached(network):
        return False  # The forward may use the trainer.
    if not decide_by_shapes(network, example):
        return False
    traced = trace_open(network)
    number = len(cut_positions(traced))
    if number < request.stage_count - 1:
        raise ConfigurationError(
            f"stages={request.stage_count}: {type(network).__name__} has {number} places to cut; use at most "
            f"{number + 1} stages"
        )
    if request.cuts is not None:
        check_cuts(traced, request.cuts)
    return True
