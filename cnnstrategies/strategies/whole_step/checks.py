"""Check before training that a network can be divided as the strategy's arguments say."""

from collections.abc import Callable
from typing import Any

from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage import check_cuts
from cnnstrategies.pipeline.timetable import check_layout
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest


def check_division(network: nn.Module, request: LayoutRequest, devices: int, example: Callable[[int], Any]) -> bool:
    """Return whether a network can be divided; False if this is only known when there are example images.

    Args:
        network: The network.
        request: The strategy's arguments.
        devices: Number of ranks.
        example: See `decide_by_shapes`.

    Raises:
        ConfigurationError: The network cannot be divided so, or the layout does not fit the devices.
    """
    placement = request.placement_on(devices, request.microbatches_on(devices, network))
    check_layout(request.stage_count - 1, placement, devices)
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
