"""A plan that is made again by measured times: what is proposed is quicker by them, and a plan that holds stays."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from planning.random_graphs import all_layouts, chain, predictor, random_costs, random_link

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.costs import Link, NodeCost, Profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.recut import recut

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("checkpointing", "seconds", "loss", "cuts", "gain"),
    [
        ("never", [3.0, 3.0], 0.5, None, 0.0),
        ("never", [3.3, 2.9], 0.0, None, 0.0),
        # All forwards, then all backwards. Three nodes of 3 s and three of 1 s: each stage takes 6 s.
        ("never", [9.0, 3.0], 0.0, ["n1"], (8 * 9 + 3) / (8 * 6 + 6) - 1),
        # The loss takes 4 s, once, where a forward runs again, too; and it stays where it is.
        ("never", [3.0, 3.0], 4.0, ["n4"], (9 + 8 * 6 + 2) / (41 / 3 + 8 * 14 / 3 + 10 / 3) - 1),
        ("always", [4.0, 4.0], 4.0, ["n4"], (9 + 8 * 7 + 3) / (41 / 3 + 8 * 5 + 5) - 1),
    ],
)
def test_six_nodes_of_a_second_each(
    checkpointing: Any, seconds: list[float], loss: float, cuts: list[str] | None, gain: float
) -> None:
    fixed = {"schedule": "gpipe", "activation_checkpointing": checkpointing, "replicas": (1, 1)}
    job = predictor(chain([1.0] * 6), Link(1e12, 0.0), 2, 8, **fixed).job
    better = recut(job, Layout((3,), (1, 1)), job.samples, seconds, loss)
    assert cuts == (better and better.cuts)
    assert better is None or better.gain == pytest.approx(gain)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_proposed_is_the_best_by_the_measured_times(seed: int) -> None:
    rng = random.Random(seed)
    replicas = rng.choice([(1, 1), (2, 1), (1, 1, 1), (1, 2, 1)])
    fixed = {"schedule": rng.choice(["gpipe", "1f1b"]), "activation_checkpointing": rng.choice(["never", "always"])}
    of = predictor(
        random_costs(rng), random_link(rng), sum(replicas), rng.choice([2, 4, 6]), replicas=replicas, **fixed
    )
    costs, layout = of.costs, rng.choice(list(all_layouts(of)))
    rates = [rng.choice([0.3, 1.0, 1.0, 2.0, 5.0]) for _ in replicas]
    stages = [sum(cut <= index for cut in layout.cuts) for index in range(len(costs.nodes))]
    nodes = [
        replace(node, forward=rates[stage] * node.forward, backward=rates[stage] * node.backward)
        for node, stage in zip(costs.nodes, stages, strict=True)
    ]

    def times(nodes: Sequence[NodeCost]) -> list[float]:
        found = [0.0] * len(replicas)
        for node, stage in zip(nodes, stages, strict=True):
            found[stage] += node.forward * (1 if fixed["activation_checkpointing"] == "never" else 2) + node.backward
        return found

    seconds, planned = times(nodes), times(costs.nodes)
    assert recut(of.job, layout, of.job.samples, [7 * time for time in planned], 0.0) is None
    better = recut(of.job, layout, of.job.samples, seconds, 0.0)
    truth = Predictor(replace(of.job, profile=Profile(replace(costs, nodes=tuple(nodes)))))
    gain = truth.time(layout) / min(map(truth.time, all_layouts(of))) - 1
    parts = [took / plan * sum(planned) / sum(seconds) for took, plan in zip(seconds, planned, strict=True)]
    assert (better is not None) == (gain > 0.05 and max(abs(part - 1) for part in parts) > 0.1)
    if better is not None:
        names = [node.name for node in costs.nodes]
        chosen = Layout(tuple(names.index(name) + 1 for name in better.cuts), replicas)
        assert truth.time(layout) / truth.time(chosen) - 1 == pytest.approx(better.gain) == pytest.approx(gain)
        assert better.planned == pytest.approx(planned)
