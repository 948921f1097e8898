"""Choose the layout of a network: profile it, then search."""

from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.measure_network import profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.request import Request, check_request

TEN_GIGABIT = Link(bandwidth=1.25e9, latency=5e-5)


def choose_layout(
    network: nn.Module, microbatch: Images, request: Request, link: Link = TEN_GIGABIT
) -> tuple[Layout, bool]:
    """The layout with the least predicted step time that the request permits, and whether its stages run ahead.

    The network is measured on its device and left as it was. Since times vary, two calls may choose differently:
    in a distributed run one rank chooses and tells the others.

    Args:
        network: The network, on the device that it will train on.
        microbatch: One microbatch of images (n, C, H, W) on the same device.
        request: Devices, schedule and what the user has fixed.
        link: The connection between any two devices.

    Raises:
        ConfigurationError: The network cannot be traced, or no layout fulfils the request.
    """
    costs = profile(trace(network), microbatch)
    check_request(costs, request)
    predictor = Predictor(costs, link, request)
    layout = find_layout(predictor)
    return layout, predictor.runs_ahead(layout)


def find_layout(predictor: Predictor) -> Layout:
    """The layout with the least predicted step time, or the one that the request names.

    Raises:
        ConfigurationError: No layout fits into memory.
    """
    request = predictor.request
    layout = predictor.fixed_layout() or predictor.search(predictor.time, request.memory_limit)
    if layout is not None and predictor.time(layout) < float("inf"):
        return layout
    smallest = predictor.fixed_layout() or predictor.search(predictor.memory, None)
    assert smallest is not None, "without a limit some layout exists, since there are enough places to cut"
    raise ConfigurationError(
        f"memory_limit={request.memory_limit}: on {request.devices} devices with {request.microbatches} "
        f"microbatches a device needs {predictor.memory(smallest):.0f} bytes; raise the limit, use more stages "
        "or microbatches, or set activation_checkpointing='always'"
    )
