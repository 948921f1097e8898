"""Cuts for the benchmarks: balanced by the profile, by name for the engine and by child for a peer that slices."""

from torch import Tensor, nn

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.tracing import find_cut, ordered_nodes, trace
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.measure_network import profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.request import Request
from cnnstrategies.planning.stage_costs import StageCost

LOOPBACK = Link(bandwidth=2e9, latency=2e-4)


def cut_between_children(network: nn.Sequential, microbatch: Tensor, microbatches: int) -> tuple[str, int]:
    """The best place for two stages between children of the network: the last node's name, and the child after it.

    In-place layers are left with their producer, since a peer that slices cannot start with one.
    """
    traced = trace(network)
    costs = profile(traced, microbatch)
    children = list(network.named_children())
    positions = {}
    for index, (_, child) in enumerate(children[1:], start=1):
        if not getattr(child, "inplace", False):
            positions[find_cut(traced, children[index - 1][0])] = index
    between = GraphCosts(costs.nodes, costs.values, tuple(sorted(positions)), costs.microbatch_size, costs.input_bytes)
    predictor = Predictor(between, LOOPBACK, Request(2, microbatches, replicas=(1, 1)))
    layout = predictor.search(predictor.time, None)
    assert layout is not None
    cut = layout.cuts[0]
    return ordered_nodes(traced)[cut - 1].name, positions[cut]


def best_cut(network: nn.Module, microbatch: Tensor, microbatches: int, link: Link) -> tuple[Predictor, Layout, str]:
    """The best place for two stages anywhere: the predictor, the layout and the last node's name."""
    traced = trace(network)
    predictor = Predictor(profile(traced, microbatch), link, Request(2, microbatches, replicas=(1, 1)))
    layout = predictor.search(predictor.time, None)
    assert layout is not None
    return predictor, layout, ordered_nodes(traced)[layout.cuts[0] - 1].name


def bound(stages: list[StageCost], microbatches: int) -> float:
    """The shortest step of a pipeline without transfers: sum t_i + (M - 1) max t_i."""
    times = [stage.time for stage in stages]
    return sum(times) + (microbatches - 1) * max(times)
