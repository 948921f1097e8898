"""Tests of plans that are corrected by measured times: a proposal is faster, and a good plan stays."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.costs import Link, NodeCost, Profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.recut import recut
from tests.planning.random_graphs import all_layouts, chain, predictor, random_costs, random_link

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("checkpointing", "seconds", "loss", "cuts", "gain"),
    [
        ("never", [3.0, 3.0], 0.5, None, 0.0),
        ("never", [3.3, 2.9], 0.0, None, 0.0),
        # All forwards run before all backwards. Three nodes take 3 s and three take 1 s; after the cut each stage takes
        # 6 s.
        ("never", [9.0, 3.0], 0.0, ["n1"], (8 * 9 + 3) / (8 * 6 + 6) - 1),
        # The loss takes 4 s once, even if forwards are recomputed, and stays in the last stage.
        ("never", [3.0, 3.0], 4.0, ["n4"], (9 + 8 * 6 + 2) / (41 / 3 + 8 * 14 / 3 + 10 / 3) - 1),
        ("always", [4.0, 4.0], 4.0, ["n4"], (9 + 8 * 7 + 3) / (41 / 3 + 8 * 5 + 5) - 1),
    ],
)
def test_recut_of_six_equal_nodes_matches_times_worked_out_by_hand(
    checkpointing: Any, seconds: list[float], loss: float, cuts: list[str] | None, gain: float
) -> None:
    fixed = {"schedule": "gpipe", "activation_checkpointing": checkpointing, "replicas": (1, 1)}
    job = predictor(chain([1.0] * 6), Link(1e12, 0.0), 2, 8, **fixed).job
    better = recut(job, Layout((3,), (1, 1)), job.samples, seconds, loss)
    assert cuts == (better and better.cuts)
    assert better is None or better.gain == pytest.approx(gain)


@pytest.mark.parametrize("seed", range(40))
def test_the_proposed_cut_is_the_best_by_measured_times(seed: int) -> None:
    rng = random.Random(seed)
    replicas = rng.choice([(1, 1), (2, 1), (1, 1, 1), (1, 2, 1)])
    fixed = {"schedule": rng.choice(["gpipe", "1f1b"]), "activation_checkpointing": rng.choice(["never", "always"])}
    planner = predictor(
        random_costs(rng), random_link(rng), sum(replicas), rng.choice([2, 4, 6]), replicas=replicas, **fixed
    )
    costs, layout = planner.costs, rng.choice(list(all_layouts(planner)))
    rates = [rng.choice([0.3, 1.0, 1.0, 2.0, 5.0]) for _ in replicas]
    stages = [sum(cut <= index for cut in layout.cuts) for index in range(len(costs.nodes))]
    nodes = [
        replace(node, forward=rates[stage] * node.forward, backward=rates[stage] * node.backward)
        for node, stage in zip(costs.nodes, stages, strict=True)
    ]

    def times(nodes: Sequence[NodeCost]) -> list[float]:
        stage_seconds = [0.0] * len(replicas)
        for node, stage in zip(nodes, stages, strict=True):
            stage_seconds[stage] += (
                node.forward * (1 if fixed["activation_checkpointing"] == "never" else 2) + node.backward
            )
        return stage_seconds

    seconds, planned = times(nodes), times(costs.nodes)
    assert recut(planner.job, layout, planner.job.samples, [7 * time for time in planned], 0.0) is None
    better = recut(planner.job, layout, planner.job.samples, seconds, 0.0)
    truth = Predictor(replace(planner.job, profile=Profile(replace(costs, nodes=tuple(nodes)))))
    gain = truth.time(layout) / min(map(truth.time, all_layouts(planner))) - 1
    parts = [took / plan * sum(planned) / sum(seconds) for took, plan in zip(seconds, planned, strict=True)]
    assert (better is not None) == (gain > 0.05 and max(abs(part - 1) for part in parts) > 0.1)
    if better is not None:
        names = [node.name for node in costs.nodes]
        chosen = Layout(tuple(names.index(name) + 1 for name in better.cuts), replicas)
        assert truth.time(layout) / truth.time(chosen) - 1 == pytest.approx(better.gain) == pytest.approx(gain)
        assert better.planned == pytest.approx(planned)
