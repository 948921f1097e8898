"""Tests of the search for cuts and replicas: it is compared with exhaustive search and must respect all limits."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from cnnstrategies.pipeline.timetable import Layout, timetable
from cnnstrategies.planning import partition
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from tests.planning.random_graphs import (
    all_layouts,
    chain,
    excess,
    predictor,
    random_costs,
    random_link,
    random_question,
    random_question_on_machines,
    with_unequal_devices,
)

pytestmark = pytest.mark.light

FAST = Link(bandwidth=1e12, latency=0.0)


def test_the_search_is_within_5_percent_of_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds on equal devices and on two machines, and also if the search may not try all layouts."""
    rng = random.Random(1)
    questions = [random_question(rng) for _ in range(20)]
    over = [excess(question) for question in (*questions, random_question_on_machines(rng))]
    assert max(over) == 1, over
    monkeypatch.setattr(partition, "ALL_LAYOUTS", 0)
    monkeypatch.setattr(partition, "MOST_STARTS", 6)
    machines = [random_question_on_machines(random.Random(seed)) for seed in range(4)]
    over = [excess(question) for question in (*questions, *machines)]
    assert max(over) <= 1.05, over


def test_no_time_is_below_its_bound() -> None:
    """The search relies on bounds: it does not simulate layouts whose bound is above the best time."""
    rng = random.Random(5)
    for planner in [
        made for _ in range(10) for made in (random_question(rng), with_unequal_devices(random_question(rng), rng))
    ]:
        assert all(
            planner.problem.bound(layout) <= planner.time(layout) * (1 + 1e-9) for layout in all_layouts(planner)
        )


def test_no_device_holds_more_microbatches_than_predicted() -> None:
    rng = random.Random(8)
    for _ in range(30):
        planner = with_unequal_devices(random_question(rng), rng)
        for layout, run_ahead in itertools.product(all_layouts(planner), (False, True)):
            problem = planner.problem
            tasks = timetable(
                layout.replicas, problem.microbatches, planner.job.schedule, run_ahead, problem.shares(layout)
            )
            held = [
                max(itertools.accumulate(1 if task.kind == "forward" else -1 for task in rank_tasks))
                for rank_tasks in tasks
            ]
            flights = [problem.flights(section, run_ahead) for section in problem.sections(layout)]
            assert held == list(itertools.chain(*flights))


def test_a_long_step_is_predicted_from_a_part_of_it() -> None:
    costs = chain([1.0, 2.0, 1.0, 3.0], sent=10**9, parameters=[10**6] * 4)
    cluster = Cluster((Host(6, Link(1e9, 1e-5), Link(1e10, 1e-5)),) * 4)
    for replicas, microbatches in (((12, 12), 3000), ((18, 6), 3000), ((4, 1), 3001)):
        planner = predictor(costs, cluster, 24, microbatches)
        layout = Layout((2,), replicas)
        assert planner.time(layout) == pytest.approx(planner.simulate(layout, True).step_time, rel=0.01)


def test_128_devices_are_planned_in_seconds() -> None:
    """Planning a network of 430 nodes takes less than 30 s of CPU time, a generous limit for slow machines."""
    rng = random.Random(6)
    size = [int(10 ** rng.uniform(4, 6.5)) for _ in range(430)]
    costs = chain([rng.uniform(1e-4, 2e-3) for _ in range(430)], sent=10**7, parameters=size)
    cluster = Cluster((Host(8, Link(6e8, 5e-5), Link(1e10, 1e-5)),) * 16)
    start = time.process_time()
    assert predictor(costs, cluster, 128, 128).search() is not None
    assert time.process_time() - start < 30


def test_a_memory_limit_is_kept_when_few_layouts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    tight = 0
    for _ in range(6):
        costs, link = random_costs(rng), random_link(rng)
        free = predictor(costs, link, 3, 4, stages=3)
        memories = sorted(free.memory(layout) for layout in all_layouts(free))
        limit = int(memories[len(memories) // 3]) + 1
        limited = predictor(costs, link, 3, 4, stages=3, memory_limit=limit)
        layout_found = limited.search()
        assert layout_found is not None
        assert limited.memory(layout_found) <= limit
        assert limited.time(layout_found) == min(map(limited.time, all_layouts(limited)))
        tight += free.memory(free.search() or layout_found) > limit
    assert tight > 1, "the limit must have changed the choice in some of the graphs"
    far = chain([1.0] * 40, parameters=[0] * 36 + [1000] * 4)
    for least in (partition.ALL_LAYOUTS, 0):
        monkeypatch.setattr(partition, "ALL_LAYOUTS", least)
        planner = predictor(far, FAST, 2, 8, stages=2, memory_limit=3 * 2000 + 100)
        assert planner.search() == Layout((38,), (1, 1)), "the only layout that fits is far from the fastest layout"


def test_stages_run_ahead_where_messages_take_time() -> None:
    """A microbatch takes 12 s in a stage and 2.4 s as a message, so one more microbatch in flight gains a tenth."""
    costs = chain([1.0] * 24, sent=2400, saved=1000)
    layout, slow = Layout((12,), (1, 1)), Link(bandwidth=1000.0, latency=0.0)
    planner = predictor(costs, slow, 2, 8)
    assert planner.runs_ahead(layout)
    assert planner.simulate(layout, True).step_time < 0.9 * planner.simulate(layout, False).step_time
    assert not predictor(costs, FAST, 2, 8).runs_ahead(layout), "running ahead gains nothing if messages take no time"
    wider = predictor(costs, slow, 4, 8)
    assert not wider.runs_ahead(Layout((18,), (3, 1))), "rounding up already allows another microbatch"
    limited = predictor(costs, slow, 2, 8, memory_limit=round(planner.memory(layout)))
    assert not limited.runs_ahead(layout)
    assert limited.time(layout) == planner.simulate(layout, False).step_time
    assert predictor(costs, FAST, 2, 8, run_ahead=True).runs_ahead(layout), "the user's option decides"


def test_only_permitted_positions_are_cut() -> None:
    costs = replace(chain([1.0] * 8), cut_positions=(1, 6))
    assert predictor(costs, FAST, 2, 8, stages=2).search() == Layout((6,), (1, 1))
    assert predictor(replace(costs, cut_positions=(4,)), FAST, 3, 8, stages=3).search() is None, (
        "three stages need two cuts"
    )
