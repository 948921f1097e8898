"""Refuse networks and layouts that cannot be divided, before processes are started."""

from collections.abc import Callable

from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.stage import check_cuts
from cnnstrategies.pipeline.timetable import check_layout
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from cnnstrategies.placed import ForeignTensor
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.whole_step.network import module_at

COMPILE_STAGES = (
    "strategy hybrid_pipeline cuts the network before it is compiled: leave out torch.compile, and let the callback "
    "ComputeSettings(compile_backend='inductor') compile each stage, or use strategy ddp"
)


def check_state(module: LightningModule, path: str) -> None:
    """Refuse a module that is compiled, or that has lost parameters in an earlier run.

    Args:
        module: The module.
        path: Path of the divided network.

    Raises:
        ConfigurationError: The module cannot be divided.
    """
    name, network = type(module).__name__, module_at(module, path)
    compiled = [f".{path}.{child}".rstrip(".") for child, entry in network.named_modules() if is_compiled(entry)]
    if compiled or is_compiled_whole(module):
        raise ConfigurationError(f"{name}{compiled[0] if compiled else ''} is compiled: {COMPILE_STAGES}")
    if any(isinstance(tensor, ForeignTensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigurationError(
            f"parts of {name}.{path} are gone: an earlier run with strategy hybrid_pipeline has failed and left each "
            "rank its own stage alone; create the module again, and continue from the last checkpoint"
        )


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
        Whether everything is checked. If not, the network needs example images, and there are none yet.

    Raises:
        ConfigurationError: The layout does not fit the devices or the network.
    """
    check_layout(
        request.stage_count - 1, request.placement_on(devices, request.microbatches_on(devices, network)), devices
    )
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
