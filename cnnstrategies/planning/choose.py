"""Choose the layout of a network: profile it, then search."""

from torch import nn

from cnnstrategies.pipeline.batch import Images
from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.measure_network import profile
from cnnstrategies.planning.predict import Predictor, find_layout
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
