"""Tests of the simulator and of the costs of summing gradients, against times that can be worked out by hand."""

import itertools
from dataclasses import replace

import pytest

from cnnstrategies import ConfigurationError
from cnnstrategies.pipeline import gradients
from cnnstrategies.pipeline.timetable import Task, timetable
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import (
    BUCKET_BYTES,
    BucketCost,
    StageCost,
    StageMessage,
    all_reduce,
    buckets,
    reduced_at,
)

pytestmark = pytest.mark.light

FREE = Link(bandwidth=float("inf"), latency=0.0)
QUICK = Link(bandwidth=100.0, latency=0.0)


def stage(forward: float, backward: float, parameter_bytes: int = 0) -> StageCost:
    gradients = tuple((backward * part / 3, parameter_bytes // 3) for part in (1, 2, 3))
    return StageCost(1, forward, backward, parameter_bytes, 0, 0, gradients)


def gpipe(stages: int, microbatches: int) -> list[list[Task]]:
    return timetable([1] * stages, microbatches, "gpipe")


def chain(stages: int, size: int = 1, back: int = 1) -> dict[tuple[int, int], StageMessage]:
    return {(index, index + 1): StageMessage(size, back) for index in range(stages - 1)}


def test_a_gpipe_step_takes_the_sum_plus_m_minus_one_times_the_slowest_stage() -> None:
    """Forwards and backwards each take T = sum t_i + (M - 1) max t_i. With equal stages 1F1B takes as long."""
    for times in ([1.0], [1.0, 3.0], [2.0, 1.0, 4.0], [3.0, 1.0, 1.0, 2.0]):
        for microbatches in (1, 2, 7):
            stages = [stage(time, 2 * time) for time in times]
            step = simulate(gpipe(len(times), microbatches), stages, chain(len(times)), FREE)
            assert step.step_time == pytest.approx(3 * (sum(times) + (microbatches - 1) * max(times)))
    equal = simulate(timetable([1] * 4, 8, "1f1b"), [stage(1.0, 2.0)] * 4, chain(4), FREE)
    assert equal.step_time == pytest.approx(3.0 * (4 + 7))


TWO_SENDERS = [
    [Task("forward", 0, 0), Task("backward", 0, 0)],
    [Task("forward", 0, 1), Task("backward", 0, 1)],
    [Task("forward", 1, 0), Task("forward", 1, 1), Task("backward", 1, 0), Task("backward", 1, 1)],
]
ALONE = [[Task("forward", 0, m), Task("backward", 0, m)] for m in range(2)]
SKIP = {(0, 2): StageMessage(10, 0), (1, 2): StageMessage(0, 0), (0, 1): StageMessage(0, 0)}
STEPS = {
    "a message costs latency and its bytes, each way": (
        4.0 + (0.5 + 2.0) + (0.5 + 1.0),
        (gpipe(2, 1), [stage(1.0, 1.0)] * 2, chain(2, 200, 100), Link(bandwidth=100.0, latency=0.5)),
    ),
    "sender and receiver work for each message": (
        4.0 + 4 * 1.0,
        (gpipe(2, 1), [stage(1.0, 1.0)] * 2, chain(2), Link(bandwidth=float("inf"), latency=0.0, work=1.0)),
    ),
    "messages of one port follow each other": (
        1.0 + 2.0 + 2.0,
        (gpipe(2, 2), [stage(1.0, 0.0), stage(0.0, 0.0)], chain(2, 200, 0), QUICK),
    ),
    "two senders share the receiver's port": (
        1.0 + 2.0 + 2.0,
        (TWO_SENDERS, [stage(1.0, 0.0), stage(0.0, 0.0)], chain(2, 200, 0), QUICK),
    ),
    "messages overlap with computation": (
        1.0 + 1.0 + 4.0,
        (gpipe(2, 4), [stage(1.0, 0.0)] * 2, chain(2, 100, 0), QUICK),
    ),
    "a value that skips a stage is waited for": (
        1.0 + 10.0 + 2.0,
        (gpipe(3, 1), [stage(1.0, 1.0)] * 3, SKIP, Link(bandwidth=1.0, latency=0.0)),
    ),
    # A ring of two ranks sends each byte once in each direction: 300 bytes take 3 s. A backward of 4 s hides all of it
    # except the last bucket.
    "a bucket is reduced after the backward": (5.0 + 1.0, (ALONE, [stage(1.0, 4.0, 300)], {}, QUICK, 100)),
    "a single bucket is reduced after the whole backward": (
        5.0 + 3.0,
        (ALONE, [stage(1.0, 4.0, 300)], {}, QUICK, 1000),
    ),
}


def test_steps_take_the_time_worked_out_by_hand() -> None:
    for name, (seconds, step) in STEPS.items():
        assert simulate(*step).step_time == pytest.approx(seconds), name


def test_task_orders_that_deadlock_are_refused() -> None:
    tasks = [[Task("backward", 0, 0), Task("forward", 0, 0)], [Task("forward", 1, 0), Task("backward", 1, 0)]]
    with pytest.raises(ValueError, match=r"rank 0 waits forever for the inputs of .*backward"):
        simulate(tasks, [stage(1.0, 1.0)] * 2, chain(2), FREE)


def test_every_timetable_runs_without_deadlock() -> None:
    layouts = ([1, 1], [3, 1], [1, 3], [1, 4, 1], [2, 2], [2, 1, 3], [1, 1, 1, 1])
    for replicas, microbatches in itertools.product(layouts, (1, 3, 8, 13)):
        stages = len(replicas)
        for schedule, run_ahead in (("gpipe", False), ("1f1b", False), ("1f1b", True)):
            tasks = timetable(replicas, microbatches, schedule, run_ahead)
            step = simulate(tasks, [stage(1.0, 2.0)] * stages, chain(stages), FREE)
            assert len([span for span in step.spans if span.kind == "backward"]) == microbatches * stages


def test_1f1b_limits_the_microbatches_in_flight_per_stage() -> None:
    first = timetable([1, 1], 3)[0]
    assert [f"{task.kind[0]}{task.microbatch}" for task in first] == ["f0", "f1", "b0", "f2", "b1", "b2"]
    for run_ahead, most in ((False, [4, 2, 2, 1]), (True, [5, 2, 2, 1])):
        tasks = timetable([1, 2, 1], 12, "1f1b", run_ahead)
        held = [
            max(itertools.accumulate(1 if task.kind == "forward" else -1 for task in rank_tasks))
            for rank_tasks in tasks
        ]
        assert held == most


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="schedule='2f2b' is not known; use gpipe or 1f1b"):
        timetable([1, 1], 4, "2f2b")


def test_a_ring_uses_the_links_between_its_devices() -> None:
    cluster = Cluster((Host(4, Link(10, 0.5), Link(100, 0.1)),) * 2)
    assert all_reduce(cluster, 0, 8)(800) == pytest.approx(2 * 7 * (0.5 + 800 / 8 / 10))
    assert all_reduce(cluster, 4, 4)(800) == pytest.approx(2 * 3 * (0.1 + 2)), "inside one machine"
    assert all_reduce(cluster, 3, 1)(800) == 0.0
    assert Link(float("inf"), 0.0, work=1.0).all_reduce_time(400, 4) == pytest.approx(2 * 3 * 2 * 1.0)
    priced, bare = Link(10, 0.5, 0.1, sum=3.0), Link(10, 0.5, 0.1)
    assert priced.all_reduce_time(1e-9, 2) == pytest.approx(3.0), "a sum over two devices takes the measured time"
    assert priced.all_reduce_time(400, 4) == pytest.approx(bare.all_reduce_time(400, 4) + 3.0 - 2 * 0.7)
    assert priced.all_gather_time(400, 4) == pytest.approx(bare.all_gather_time(400, 4) + 3.0 - 2 * 0.7)
    assert Link(10, 0.5, 0.1, sum=0.1).all_reduce_time(400, 4) == bare.all_reduce_time(400, 4), "two messages take more"


def test_a_bucket_waits_for_its_gradients_and_for_the_previous_bucket() -> None:
    assert BUCKET_BYTES == gradients.BUCKET_BYTES
    gathered = buckets([(1.0, 10), (2.0, 0), (3.0, 30), (4.0, 30), (5.0, 5)], size=50, first=10)
    assert gathered == [BucketCost(1.0, 10), BucketCost(4.0, 60), BucketCost(5.0, 5)]
    parts = [BucketCost(1.0, 10), BucketCost(2.0, 30), BucketCost(9.0, 10)]
    for rate, seconds in ((10, 10.0), (5, 11.0), (1, 1 + 10 + 30 + 10)):
        assert reduced_at(parts, 10.0, lambda size, rate=rate: size / rate) == pytest.approx(seconds)


def test_replicas_exchange_statistics_before_the_gradients_and_results_at_the_end() -> None:
    """The two replicas of a stage send each other 50 bytes of statistics, and 2 results of 25 bytes, at 100 bytes/s.

    Forwards take 1 s and backwards 3 s. The statistics travel during the backward, and the first two of the three
    buckets of 100 bytes as well. An all-reduce among two replicas takes as long as sending the bytes once.
    """
    plain = stage(1.0, 3.0, 300)
    parts = [Task("forward", 0, 0), Task("backward", 0, 0)], [Task("forward", 0, 1), Task("backward", 0, 1)]
    for statistics, results, bucket, expected in ((0, 0, 100, 5.0), (50, 0, 100, 5.0), (250, 0, 100, 6.5)):
        costs = replace(plain, statistics_bytes=statistics, result_bytes=results)
        assert simulate(parts, [costs], {}, QUICK, bucket).step_time == pytest.approx(expected)
    costs = replace(plain, result_bytes=25)
    assert simulate(parts, [costs], {}, QUICK, 100).step_time == pytest.approx(5.25)
