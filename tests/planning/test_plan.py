"""Plans of pipelines: numbers that can be worked out by hand, and refusals."""

import io
from dataclasses import replace
from typing import Any

import pytest
from planning.random_graphs import chain, predictor
from rich.console import Console

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.predict import choose_layout
from cnnstrategies.planning.report import Plan, describe, stages_table
from cnnstrategies.planning.stage_costs import StageCost

pytestmark = pytest.mark.light

# Four nodes of 10 ms forward and 20 ms backward, for 2 samples.
COSTS = chain([0.03] * 4, sent=1000, parameters=[400] * 4, saved=5000, samples=2, input_bytes=700)


def plan(devices: int, **fixed: Any) -> Plan:
    made = predictor(COSTS, Link(bandwidth=1e12, latency=0.0), devices, 4, **fixed)
    return describe(made, choose_layout(made.job)[0])


def test_stages_times_memory_and_step_by_hand() -> None:
    made = plan(2, stages=2, state_copies=4)
    assert made.layout == Layout((2,), (1, 1))
    assert made.step_time == pytest.approx(0.06 + 4 * 0.06)
    assert made.samples_per_second == pytest.approx(8 / 0.3)
    first, last = made.stages
    assert (first.first, first.last, last.first, last.last) == ("n0", "n1", "n2", "n3")
    assert (first.sent_bytes, last.sent_bytes, made.sent_bytes) == (1000, 0, 4 * 2000)
    assert first.memory == 4 * 800 + 2 * (700 + 10000), "1f1b holds 2 microbatches in the first of 2 stages"
    assert last.memory == 4 * 800 + 1 * (1000 + 10000)
    assert first.busy == pytest.approx(4 * 0.06 / 0.3)
    held = plan(2, schedule="gpipe", stages=2, state_copies=2)
    assert held.stages[0].memory == 2 * 800 + 4 * (700 + 10000), "gpipe holds all"
    light = plan(2, schedule="gpipe", stages=2, state_copies=2, activation_checkpointing="always")
    assert light.stages[0].memory == 2 * 800 + 4 * 700 + 10000, "or with checkpoints their inputs"
    assert light.step_time == pytest.approx(held.step_time * 4 / 3), "the forward runs twice"


def test_table_has_a_row_for_each_stage_and_fits_80_columns() -> None:
    output = io.StringIO()
    made = plan(4, replicas=(3, 1))
    size = 999 * 2**20
    cost = StageCost(150, 1.2345, 12.345, size, size, size)
    wide = [replace(stage, cost=cost, sent_bytes=size, memory=size, busy=1.0) for stage in made.stages]
    for shown in (made, replace(made, stages=tuple(wide))):
        Console(file=output, width=80).print(stages_table(shown))
    text = output.getvalue()
    assert "stage 1: n3 to n3" in text
    assert "30.00" in text
    assert f"{made.step_time * 1e3:.1f} ms for 8 samples" in text
    assert "12345.00" in text
    assert "…" not in text


def test_what_does_not_fit_or_divide_is_refused_with_the_remedy() -> None:
    for fixed in ({"stages": 2}, {"cuts": (1,)}):
        with pytest.raises(ConfigurationError, match=r"memory_limit=100: on 2 devices with 4 micro.* needs"):
            plan(2, memory_limit=100, **fixed)
    with pytest.raises(ConfigurationError, match="3 devices do not divide evenly into 2 stages: give replicas"):
        plan(3, cuts=(1,))
