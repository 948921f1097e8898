"""Which ranks are on one machine: those that sum gradients, or those that send each other activations."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Profile, Value
from cnnstrategies.planning.places import placed
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.problem import Request
from cnnstrategies.planning.rank import rank
from cnnstrategies.planning.report import describe, summary, write_overlay

pytestmark = pytest.mark.light

NETWORK, INSIDE = Link(1e8, 5e-5), Link(1e10, 1e-5)
TWO = Cluster((Host(4, NETWORK, INSIDE),) * 2)
LAYOUT = Layout((2,), (4, 4))


def costs(parameters: int, activations: int) -> GraphCosts:
    nodes = tuple(NodeCost(f"n{i}", 0.01, 0.02, parameters) for i in range(4))
    values = tuple(Value(i, (i + 1,), activations, activations) for i in range(3))
    return GraphCosts(nodes, values, (1, 2, 3), microbatch_size=8, input_bytes=700)


def predictor(parameters: int, activations: int = 500_000, microbatches: int = 16) -> Predictor:
    return Predictor(costs(parameters, activations), TWO, Request(8, microbatches, replicas=(4, 4), cuts=(2,)))


def test_each_order_has_its_ranks_on_the_machines() -> None:
    assert placed(TWO, LAYOUT, "stages").host_of == (0, 0, 0, 0, 1, 1, 1, 1)
    assert placed(TWO, LAYOUT, "replicas").host_of == (0, 0, 1, 1, 0, 0, 1, 1)


def test_few_parameters_go_between_machines_and_few_activations() -> None:
    """On both sides of the crossover.

    Stage by stage the activations of each microbatch cross the network. Pipeline by pipeline two rings of four do, each
    with 2 * 3 / 4 of its stage's parameters, and share it: with one of them alone the crossover would be beyond 600 kB.
    """
    chosen = {}
    for parameters in (10_000, 100_000, 300_000, 600_000, 30_000_000):
        found = predictor(parameters)
        chosen[parameters] = found.placement(LAYOUT)
        times = {order: found.simulate(LAYOUT, True, order).step_time for order in ("stages", "replicas")}
        assert times[chosen[parameters]] <= 1.01 * min(times.values())
    assert list(chosen.values()) == ["replicas", "replicas", "replicas", "stages", "stages"]
    assert predictor(100_000, activations=500).placement(LAYOUT) == "stages", "where it is the same, the usual one"


def test_a_long_step_is_predicted_as_a_simulated_one() -> None:
    found = predictor(10_000, 3_000_000, microbatches=1000)
    assert found.placement(LAYOUT) == "replicas"
    assert found.time(LAYOUT) == pytest.approx(found.simulate(LAYOUT, True, "replicas").step_time, rel=0.01)


def test_the_plan_says_and_writes_it(tmp_path: Path) -> None:
    for parameters, expected in ((10_000, "replicas"), (30_000_000, "stages")):
        profile = Profile(costs(parameters, 500_000), ((0.0, 0.0),) * 4)
        job = Job(profile, TWO, 128, microbatches=16, replicas=(4, 4), cuts=(2,), families=("hybrid",))
        ranking = rank(job)
        write_overlay(tmp_path / "strategy.yaml", ranking)
        written = yaml.safe_load((tmp_path / "strategy.yaml").read_text())["trainer"]
        assert written["strategy"]["init_args"]["placement"] == expected
        assert ranking.hybrid is not None
        plan = describe(ranking.hybrid.predictor, ranking.hybrid.layout)
        assert ("placement: replicas" in summary(plan)) == (expected == "replicas")
        assert plan.step_time == pytest.approx(ranking.hybrid.predictor.time(LAYOUT), rel=0.01)


def test_a_search_finds_what_pays_with_pipelines_beside_each_other() -> None:
    """With each stage on a machine of its own no cut would pay; data parallel has all parameters on the network."""
    request = Request(8, 16)
    found = Predictor(replace(costs(2_000_000, 1_000_000)), TWO, request)
    layout = found.search()
    assert layout is not None
    assert found.time(layout) <= found.time(Layout((), (8,)))
    assert found.time(layout) <= min(found.time(Layout((cut,), (4, 4))) for cut in (1, 2, 3))
