"""Plans: numbers that can be worked out by hand, and refusals."""

import io
from dataclasses import replace
from typing import Any

import pytest
from planning.random_graphs import predictor
from rich.console import Console

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Value, format_bytes
from cnnstrategies.planning.predict import choose_layout
from cnnstrategies.planning.report import Plan, describe, stages_table
from cnnstrategies.planning.stage_costs import StageCost

pytestmark = pytest.mark.light

FAST = Link(bandwidth=1e12, latency=0.0)
SLOW = Link(bandwidth=1e6, latency=0.0)


def costs(parameters: tuple[int, int, int, int] = (400, 400, 400, 400)) -> GraphCosts:
    """Four nodes of 10 ms forward and 20 ms backward, 1000 bytes between them, 5000 kept each."""
    return GraphCosts(
        nodes=tuple(NodeCost(f"n{i}", 0.01, 0.02, size, 5000) for i, size in enumerate(parameters)),
        values=tuple(Value(i, (i + 1,), 1000, 1000) for i in range(3)),
        cut_positions=(1, 2, 3),
        microbatch_size=2,
        input_bytes=700,
    )


def plan(devices: int, microbatches: int, link: Link = FAST, of: GraphCosts | None = None, **fixed: Any) -> Plan:
    made = predictor(of or costs(), link, devices, microbatches, **fixed)
    return describe(made, choose_layout(made.job)[0])


def test_stages_times_memory_and_step_by_hand() -> None:
    made = plan(2, 4, stages=2, state_copies=4)
    assert made.layout == Layout((2,), (1, 1))
    assert made.step_time == pytest.approx(0.06 + 4 * 0.06)
    assert made.samples_per_second == pytest.approx(8 / 0.3)
    first, last = made.stages
    assert (first.first, first.last, last.first, last.last) == ("n0", "n1", "n2", "n3")
    assert first.sent_bytes == 1000
    assert last.sent_bytes == 0
    assert first.memory == 4 * 800 + 2 * (700 + 10000), "1f1b holds 2 microbatches in the first of 2 stages"
    assert last.memory == 4 * 800 + 1 * (1000 + 10000)
    assert first.busy == pytest.approx(4 * 0.06 / 0.3)
    assert made.sent_bytes == 4 * 2000


def test_gpipe_holds_all_microbatches_or_with_checkpoints_inputs() -> None:
    held = plan(2, 4, schedule="gpipe", stages=2, state_copies=2)
    assert held.stages[0].memory == 2 * 800 + 4 * (700 + 10000)
    light = plan(2, 4, schedule="gpipe", stages=2, state_copies=2, activation_checkpointing="always")
    assert light.stages[0].memory == 2 * 800 + 4 * 700 + 10000
    assert light.step_time == pytest.approx(held.step_time * 4 / 3), "the forward runs twice"


def test_named_cuts_are_kept() -> None:
    assert plan(2, 4, cuts=(3,)).layout == Layout((3,), (1, 1))
    assert plan(4, 4, cuts=(1,), replicas=(3, 1)).layout == Layout((1,), (3, 1))


def test_the_heavy_last_node_is_on_one_device() -> None:
    heavy = costs((400, 400, 400, 10**6))
    slower = plan(4, 8, SLOW, heavy)
    assert slower.layout == Layout((3,), (3, 1))
    assert slower.sent_bytes < 2 * 3 * heavy.parameter_bytes / 100, "of what data parallel sends"


def test_table_has_a_row_for_each_stage_and_fits_80_columns() -> None:
    output = io.StringIO()
    made = plan(4, 8, replicas=(3, 1))
    Console(file=output, width=80).print(stages_table(made))
    text = output.getvalue()
    assert "stage 1: n3 to n3" in text
    assert "30.00" in text
    assert f"{made.step_time * 1e3:.1f} ms for 16 samples" in text
    size = 999 * 2**20
    cost = StageCost(150, 1.2345, 12.345, size, size, size)
    wide = [replace(stage, cost=cost, sent_bytes=size, memory=size, busy=1.0) for stage in made.stages]
    Console(file=output, width=80).print(stages_table(replace(made, stages=tuple(wide))))
    assert "12345.00" in output.getvalue()
    assert "…" not in output.getvalue()


def test_what_does_not_fit_or_divide_is_refused_with_the_remedy() -> None:
    for fixed in ({"stages": 2}, {"cuts": (1,)}):
        with pytest.raises(ConfigurationError, match=r"memory_limit=100: on 2 devices with 4 micro.* needs"):
            plan(2, 4, memory_limit=100, **fixed)
    with pytest.raises(ConfigurationError, match="3 devices do not divide evenly into 2 stages: give replicas"):
        plan(3, 4, cuts=(1,))


def test_sizes_have_units() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1536, 234 * 2**20, 5 * 2**30, 15 * 2**30)] == [
        "0 B", "1.0 KiB", "1.5 KiB", "234 MiB", "5.00 GiB", "15 GiB",
    ]  # fmt: skip
