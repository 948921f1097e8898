"""Cuts for the benchmarks: balanced by the profile, by name for the engine and by child for a peer that slices."""

from torch import Tensor, nn

from cnnstrategies.pipeline.node_uses import ordered_nodes
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.pipeline.tracing import find_cut, trace
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link, Profile
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.stage_costs import StageCost

LOOPBACK = Link(bandwidth=2e9, latency=2e-4)


def cuts_of_both(network: nn.Sequential, microbatch: Tensor, microbatches: int) -> tuple[str, int, str]:
    """From one profile the best place for two stages under plain 1f1b and under a schedule that runs ahead.

    The first is between children of the network, for a peer that slices; in-place layers are left with their producer,
    since a peer cannot start with one.

    Returns:
        The last node's name and the child after it for plain 1f1b, and the last node's name for the other.
    """
    traced = trace(network)
    costs = profile(traced, microbatch, repeats=15)
    children = list(network.named_children())
    positions = {}
    for index, (_, child) in enumerate(children[1:], start=1):
        if not getattr(child, "inplace", False):
            positions[find_cut(traced, children[index - 1][0])] = index
    between = GraphCosts(costs.nodes, costs.values, tuple(sorted(positions)), costs.microbatch_size, costs.input_bytes)
    names = ordered_nodes(traced)
    cut_positions = []
    for among, run_ahead in ((between, False), (costs, True)):
        layout = two_stages(among, LOOPBACK, microbatches, run_ahead).search()
        assert layout is not None
        cut_positions.append(layout.cuts[0])
    return names[cut_positions[0] - 1].name, positions[cut_positions[0]], names[cut_positions[1] - 1].name


def best_cut(network: nn.Module, microbatch: Tensor, microbatches: int, link: Link) -> tuple[Predictor, Layout, str]:
    """The best place for two stages anywhere: the predictor, the layout and the last node's name."""
    traced = trace(network)
    predictor = two_stages(profile(traced, microbatch), link, microbatches)
    layout = predictor.search()
    assert layout is not None
    return predictor, layout, ordered_nodes(traced)[layout.cuts[0] - 1].name


def two_stages(costs: GraphCosts, link: Link, microbatches: int, run_ahead: bool | None = None) -> Predictor:
    """Return the predictor of a pipeline of two stages with the package's defaults; costs are those of a microbatch."""
    samples = round(costs.microbatch_size * microbatches)
    cluster = Cluster.flat(2, link)
    return Predictor(Job(Profile(costs), cluster, samples, microbatches, replicas=(1, 1), run_ahead=run_ahead))


def bound(stages: list[StageCost], microbatches: int) -> float:
    """The shortest step of a pipeline without transfers: sum t_i + (M - 1) max t_i."""
    times = [stage.time for stage in stages]
    return sum(times) + (microbatches - 1) * max(times)
