"""Tests of pipeline plans: numbers that can be worked out by hand, and refusals."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import CHECKPOINTINGS, Checkpointing
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.hybrid import hybrids
from cnnstrategies.planning.memory import PeakMemory
from cnnstrategies.planning.predict import Predictor, choose_layout
from cnnstrategies.planning.report import stages_table, summary
from cnnstrategies.planning.sections import Section
from tests.planning.random_graphs import chain, predictor

pytestmark = pytest.mark.light

# Four nodes that take 10 ms forward and 20 ms backward for 2 samples.
COSTS = chain([0.03] * 4, sent=1000, parameters=[400] * 4, saved=5000, samples=2, input_bytes=700)


def plan(devices: int, costs: GraphCosts = COSTS, **fixed: Any) -> tuple[Predictor, Layout]:
    made = predictor(costs, Link(bandwidth=1e12, latency=0.0), devices, 4, **fixed)
    return made, choose_layout(made.job)[0]


def printed(made: Predictor, layout: Layout) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(stages_table(made, layout, made.simulate(layout, False)))
    return output.getvalue()


def test_stages_times_memory_and_step_by_hand() -> None:
    made, layout = plan(2, stages=2, state_copies=4)
    assert layout == Layout((2,), (1, 1))
    assert made.time(layout) == pytest.approx(0.06 + 4 * 0.06)
    text = printed(made, layout)
    assert "300.0 ms for 8 samples (27 samples/s) on 2 devices, 1f1b with 4" in text
    assert "stage 0: n0 to n1\nstage 1: n2 to n3\n" in text
    assert ["0", "1", "2", "20.00", "40.00", "800", "B", "1.0", "KiB", "28", "KiB", "80%"] in map(
        str.split, text.splitlines()
    )
    # In the order 1F1B the first of 2 stages holds 2 microbatches, and the images of the whole step. The gradients of
    # the last step exist beside the sums of this step. A gradient of 1000 bytes flows, and another one arrives.
    first = PeakMemory(800, 2 * 800, 2 * 800, 2 * 10000, messages=1000, images=4 * 700, workspaces=1000)
    # The last stage sends two gradients back. The gradients of a node of 400 bytes are added to the sums.
    second = PeakMemory(800, 2 * 800, 2 * 800, 10000 + 1000, messages=2 * 1000, workspaces=400)
    assert made.stage_peaks(layout, False) == [first, second]
    assert made.device_peaks(layout) == (first, second)
    assert first.total == sum(first.parts().values()) == 28800
    assert str(first).startswith("28 KiB: activations 20 KiB, images 2.7 KiB, gradients 1.6 KiB, optimizer 1.6 KiB")
    peaks = {}
    for checkpointing in CHECKPOINTINGS:
        held, _ = plan(2, schedule="gpipe", stages=2, state_copies=2, activation_checkpointing=checkpointing)
        peaks[checkpointing] = held.stage_peaks(layout, False)[1]
        if checkpointing == "always":
            assert held.time(layout) == pytest.approx(plan(2, schedule="gpipe", stages=2)[0].time(layout) * 4 / 3)
    assert peaks["never"].activations == 4 * (10000 + 1000), "gpipe holds all microbatches"
    assert peaks["except_last"].activations == 4 * 1000 + 2 * 10000, "the last microbatch's, and one that is recomputed"
    assert peaks["always"].activations == 3 * 1000 + 10000, "with checkpointing only the inputs"
    joined, _ = plan(2, replace(COSTS, output_bytes=50), stages=2, state_copies=4)
    assert joined.stage_peaks(layout, False) == [first, replace(second, outputs=3 * 4 * 50)], (
        "results of the whole batch are joined in the last stage"
    )


def test_cuts_that_need_less_memory_are_preferred_if_a_step_is_hardly_longer() -> None:
    """A step of one microbatch takes the same time with all cuts, except for the messages."""
    small = replace(COSTS, values=(*COSTS.values[:2], replace(COSTS.values[2], bytes=10, gradient_bytes=10)))
    for bandwidth, cut in ((1e7, 2), (1e5, 3)):  # Messages over the cut in the middle take 0.2 ms and 20 ms.
        made = predictor(small, Link(bandwidth, latency=0.0), 2, 1, stages=2)
        assert choose_layout(made.job)[0] == Layout((cut,), (1, 1))
        assert made.search() == Layout((3,), (1, 1))
    assert choose_layout(replace(made.job, cuts=(1,)))[0].cuts == (1,)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("gpipe", "never"), ("gpipe", "except_last"), ("gpipe", "always"), ("1f1b", "never")]
)
def test_activations_are_recomputed_where_they_do_not_fit(schedule: str, expected: Checkpointing) -> None:
    """The order of the tasks determines how many microbatches a stage holds, and so what fits."""
    options: dict[str, Any] = {"schedule": schedule, "stages": 2, "state_copies": 4}
    link = Link(bandwidth=1e12, latency=0.0)
    fitting = predictor(COSTS, link, 2, 4, activation_checkpointing=expected, **options)
    limit = round(fitting.memory(Layout((2,), (1, 1))))
    made = predictor(COSTS, link, 2, 4, memory_limit=limit, activation_checkpointing=None, **options)
    layout, chosen = choose_layout(made.job)
    assert chosen.job.activation_checkpointing == expected
    assert layout == Layout((2,), (1, 1))
    assert chosen.memory(layout) == limit
    (candidate,) = [row for row in hybrids(made.job) if row.layout == layout]
    assert candidate.predictor.job.activation_checkpointing == expected
    assert candidate.memory == limit
    text = " ".join(summary(chosen, layout, chosen.simulate(layout, False)).split())
    assert text.endswith(
        "with 4 microbatches" + ("" if expected == "never" else f", activation_checkpointing: {expected}")
    )
    if expected != "never":
        with pytest.raises(ConfigurationError, match=r"set activation_checkpointing='always'"):
            choose_layout(replace(made.job, activation_checkpointing="never"))
        with pytest.raises(
            ConfigurationError, match=r"needs \d+ bytes; raise the limit, use more stages or microbatches$"
        ):
            choose_layout(replace(made.job, memory_limit=100))


def test_replicas_run_microbatches_as_fast_as_their_devices_do() -> None:
    """Shares of microbatches follow the devices' speeds.

    The first stage has two replicas: a microbatch takes 60 ms on the first device and 180 ms on the second. The last
    stage takes 60 ms.
    """
    link = Link(bandwidth=1e15, latency=0.0)
    cluster = Cluster(tuple(Host(1, link, link, speed=speed) for speed in (1.0, 1 / 3, 1.0)))
    layout = Layout((2,), (2, 1))
    # With shares 3 and 1, the slow device's microbatch is the third in the last stage: its gradient comes back after
    # 20 + 3 * 60 ms, and the backward takes 120 ms. With two microbatches each, the first gradient comes back after
    # 140 ms, when the slow device has done both forwards, and two backwards follow.
    dealt, equal = (3, 1, 4), ()
    for requested, shares, seconds in ((None, dealt, 0.32), ((3, 1, 1), dealt, 0.32), ((1, 1, 1), equal, 0.38)):
        made = predictor(COSTS, cluster, 3, 4, shares=requested)
        assert made.problem.shares(layout) == shares
        assert made.time(layout) == pytest.approx(seconds)
        assert made.time(layout) >= made.problem.bound(layout)
    section = Section(0, 2, first=0, replicas=2)
    assert predictor(COSTS, cluster, 3, 8).problem.dealt(section) == (6, 2)
    assert predictor(COSTS, cluster, 3, 5).problem.dealt(section) == (4, 1), "the fastest whole numbers"


def test_the_table_fits_80_columns() -> None:
    size = 999 * 2**20
    wide = [replace(node, forward=12.345, parameter_bytes=size // 4, saved_bytes=size) for node in COSTS.nodes]
    values = [replace(value, bytes=size) for value in COSTS.values]
    assert "…" not in printed(*plan(2, replace(COSTS, nodes=tuple(wide), values=tuple(values)), stages=2))


def test_plans_that_do_not_fit_or_divide_are_refused_with_the_remedy() -> None:
    for fixed in ({"stages": 2}, {"cuts": (1,)}):
        with pytest.raises(
            ConfigurationError, match=r"memory_limit=100: with 2 devices and 4 micro.* one device needs"
        ):
            plan(2, memory_limit=100, **fixed)
    with pytest.raises(ConfigurationError, match="3 devices do not divide evenly into 2 stages: give replicas"):
        plan(3, cuts=(1,))
