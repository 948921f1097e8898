"""Tests of the choice of segments whose activations are computed again, and of its place in a plan."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import GraphCosts, Link, Profile, Value
from cnnstrategies.planning.memory import NO_STATE
from cnnstrategies.planning.rank import rank
from cnnstrategies.planning.recompute import choose_segments, recomputed_peak, segments_of
from cnnstrategies.planning.report import write_overlay
from tests.planning.random_graphs import chain, random_costs

pytestmark = pytest.mark.light
LINK = Link(1e10, 1e-5)


def peak(costs: GraphCosts, cuts: tuple[int, ...]) -> int:
    """Return the bytes of activations that training with these cuts needs, counted value by value."""
    bounds = [0, *cuts, len(costs.nodes)]
    segments = [set(range(start, end)) for start, end in itertools.pairwise(bounds)]
    kept = [v.bytes for v in costs.values if not any({v.producer, *v.consumers} <= segment for segment in segments)]
    return costs.input_bytes + sum(kept) + max(sum(costs.nodes[node].saved_bytes for node in s) for s in segments)


def test_the_chosen_segments_need_almost_the_fewest_bytes() -> None:
    rng = random.Random(3)
    for _ in range(60):
        costs = replace(random_costs(rng), input_bytes=rng.randrange(10**5))
        chosen = choose_segments(costs)
        assert chosen.peak_bytes == peak(costs, chosen.cuts)
        possible = [c for n in range(len(costs.nodes)) for c in itertools.combinations(costs.cut_positions, n)]
        assert chosen.peak_bytes <= 1.1 * min(peak(costs, cuts) for cuts in possible)


def test_a_value_that_skips_segments_counts_once_and_the_last_segment_runs_once() -> None:
    costs = chain([3.0] * 6, sent=10, saved=100, input_bytes=7)
    costs = replace(costs, values=(*costs.values, Value(0, (5,), 1000, 1000)))
    segments = segments_of(costs, (2, 4))
    assert (segments.kept_bytes, segments.largest_bytes) == (7 + 2 * 10 + 1000, 200)
    assert segments.again == pytest.approx(4.0)
    assert choose_segments(chain([3.0] * 9, sent=1, saved=100)).cuts == tuple(range(1, 9))
    assert choose_segments(chain([3.0] * 9, sent=1000, saved=100)).cuts == ()


def test_copies_of_all_weights_exist_until_the_end_of_the_forward() -> None:
    costs = chain([3.0] * 4, sent=10, parameters=[40] * 4, saved=100)
    copied = replace(costs, nodes=tuple(replace(node, copied_bytes=20) for node in costs.nodes))
    plain, mixed = (recomputed_peak(graph, NO_STATE, cuts=(1, 2, 3)) for graph in (costs, copied))
    assert mixed.total - plain.total == 3 * 20


def job(memory: int | None) -> Job:
    """Return a job on two devices. Activations need 4000 bytes for each sample, or 500 with recomputation."""
    costs = chain([0.03] * 8, sent=10, parameters=[10] * 8, saved=4000, samples=8, input_bytes=80)
    cluster = Cluster((Host(2, LINK, LINK, memory=memory),))
    return Job(Profile(costs, batch_norm=True), cluster, 16, state_copies=2)


def test_a_plan_recomputes_if_a_batch_does_not_fit(tmp_path: Path) -> None:
    limited = rank(job(5000))
    names = {row.family: row for row in limited.same}
    row = names["ddp"]
    assert str(row) == "ddp, activations recomputed"
    plain = next(row for row in rank(job(None)).same if row.family == "ddp")
    # One node's activations, 7 values between nodes, and 80 bytes each of images, parameters, gradients and buckets.
    assert row.memory == 4000 + 7 * 10 + 4 * 80
    assert row.step - plain.step == pytest.approx(7 * 0.01, rel=1e-3)
    served = next(row for row in (*limited.same, *limited.changing) if row.family == "parameter_server")
    assert "activations recomputed" in str(served)
    file = tmp_path / "plan.yaml"
    write_overlay(file, replace(limited, same=(row,)))
    trainer = yaml.safe_load(file.read_text())["trainer"]
    assert trainer["callbacks+"] == {"class_path": "cnnstrategies.callbacks.ActivationCheckpointing"}
    assert trainer["strategy"] == "ddp"


def test_without_a_limit_a_note_has_the_price() -> None:
    (note,) = [note for note in rank(job(None)).notes if "ActivationCheckpointing" in note]
    assert note == (
        "with activations that are computed again (callback ActivationCheckpointing), ddp needs 4.3 KiB instead of 32 "
        "KiB on a device, and 310 ms instead of 240 ms"
    )
