"""The simulator against times that can be worked out by hand."""

import itertools

import pytest

from cnnstrategies import ConfigurationError
from cnnstrategies.pipeline.timetable import Kind, Task, in_flight, timetable
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.simulate import simulate
from cnnstrategies.planning.stage_costs import Message, StageCost

pytestmark = pytest.mark.light

FREE = Link(bandwidth=float("inf"), latency=0.0)


def stage(forward: float, backward: float, parameter_bytes: int = 0) -> StageCost:
    return StageCost(
        nodes=1, forward=forward, backward=backward, parameter_bytes=parameter_bytes, received_bytes=0, saved_bytes=0
    )


KINDS: tuple[Kind, Kind] = ("forward", "backward")


def gpipe(stages: int, microbatches: int) -> list[list[Task]]:
    return timetable([1] * stages, microbatches, "gpipe")


def chain(stages: int, size: int = 1) -> dict[tuple[int, int], Message]:
    return {(index, index + 1): Message(size, size) for index in range(stages - 1)}


def test_gpipe_takes_sum_plus_slowest_times_m_minus_one() -> None:
    """T = sum t_i + (M - 1) max t_i, for forward and backward each."""
    for times in ([1.0], [1.0, 3.0], [2.0, 1.0, 4.0], [3.0, 1.0, 1.0, 2.0]):
        for microbatches in (1, 2, 7):
            stages = [stage(time, 2 * time) for time in times]
            step = simulate(gpipe(len(times), microbatches), stages, chain(len(times)), FREE)
            assert step.step_time == pytest.approx(3 * (sum(times) + (microbatches - 1) * max(times)))


def test_a_message_costs_latency_and_bytes_by_bandwidth_each_way() -> None:
    link = Link(bandwidth=100.0, latency=0.5)
    step = simulate(gpipe(2, 1), [stage(1.0, 1.0), stage(1.0, 1.0)], {(0, 1): Message(200, 100)}, link)
    assert step.step_time == pytest.approx(4.0 + (0.5 + 2.0) + (0.5 + 1.0))


def test_a_message_costs_who_sends_and_who_receives_it_too() -> None:
    """One sent forward and one sent back, each a second of both devices; an all-reduce sends and receives in turn."""
    link = Link(bandwidth=float("inf"), latency=0.0, work=1.0)
    step = simulate(gpipe(2, 1), [stage(1.0, 1.0), stage(1.0, 1.0)], {(0, 1): Message(200, 100)}, link)
    assert step.step_time == pytest.approx(4.0 + 4 * 1.0)
    assert link.all_reduce_time(400, 4) == pytest.approx(2 * 3 * 2 * 1.0)
    assert link.scaled(0.5).work == link.work


def test_messages_of_one_port_follow_each_other() -> None:
    """Two microbatches of 2 s on the wire, made 1 s apart: the second arrives 2 s after the first."""
    link = Link(bandwidth=100.0, latency=0.0)
    step = simulate(gpipe(2, 2), [stage(1.0, 0.0), stage(0.0, 0.0)], {(0, 1): Message(200, 0)}, link)
    arrivals = [span.end for span in step.spans if span.kind == "send"]
    assert arrivals == pytest.approx([3.0, 5.0])


def test_two_senders_share_the_receivers_port() -> None:
    tasks = [
        [Task("forward", 0, 0), Task("backward", 0, 0)],
        [Task("forward", 0, 1), Task("backward", 0, 1)],
        [Task(kind, 1, m) for kind in KINDS for m in range(2)],
    ]
    link = Link(bandwidth=100.0, latency=0.0)
    step = simulate(tasks, [stage(1.0, 0.0), stage(0.0, 0.0)], {(0, 1): Message(200, 0)}, link)
    assert [span.end for span in step.spans if span.kind == "send"] == pytest.approx([3.0, 5.0])


def test_messages_overlap_with_computation() -> None:
    link = Link(bandwidth=100.0, latency=0.0)
    step = simulate(gpipe(2, 4), [stage(1.0, 0.0), stage(1.0, 0.0)], {(0, 1): Message(100, 0)}, link)
    assert step.step_time == pytest.approx(1.0 + 1.0 + 4.0)


def test_a_value_that_skips_a_stage_is_waited_for() -> None:
    slow = Link(bandwidth=1.0, latency=0.0)
    skip = {(0, 2): Message(10, 0), (1, 2): Message(0, 0), (0, 1): Message(0, 0)}
    step = simulate(gpipe(3, 1), [stage(1.0, 1.0)] * 3, skip, slow)
    assert step.step_time == pytest.approx(1.0 + 10.0 + 2.0)


def test_reduce_overlaps_with_backward_but_for_one_bucket() -> None:
    tasks = [[Task("forward", 0, m), Task("backward", 0, m)] for m in range(2)]
    link = Link(bandwidth=100.0, latency=0.0)
    cost = [stage(1.0, 4.0, parameter_bytes=300)]
    # A ring of two moves each byte once each way: 300 bytes in 3 s, hidden by a backward of 4 s but for 1 s.
    assert simulate(tasks, cost, {}, link, bucket_bytes=100).step_time == pytest.approx(5.0 + 1.0)
    assert simulate(tasks, cost, {}, link, bucket_bytes=1000).step_time == pytest.approx(5.0 + 3.0)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    tasks = [[Task("backward", 0, 0), Task("forward", 0, 0)], [Task("forward", 1, 0), Task("backward", 1, 0)]]
    with pytest.raises(ValueError, match=r"rank 0 waits for ever for the inputs of .*backward"):
        simulate(tasks, [stage(1.0, 1.0)] * 2, chain(2), FREE)


def test_every_timetable_can_be_carried_out() -> None:
    layouts = ([1, 1], [3, 1], [1, 3], [1, 4, 1], [2, 2], [2, 1, 3], [1, 1, 1, 1])
    for replicas, microbatches in itertools.product(layouts, (1, 3, 8, 13)):
        stages = len(replicas)
        for schedule, run_ahead in (("gpipe", False), ("1f1b", False), ("1f1b", True)):
            tasks = timetable(replicas, microbatches, schedule, run_ahead)
            step = simulate(tasks, [stage(1.0, 2.0)] * stages, chain(stages), FREE)
            assert len([span for span in step.spans if span.kind == "backward"]) == microbatches * stages


def test_1f1b_and_gpipe_are_equal_in_time_for_equal_free_stages() -> None:
    times = [
        simulate(timetable([1] * 4, 8, schedule), [stage(1.0, 2.0)] * 4, chain(4), FREE).step_time
        for schedule in ("gpipe", "1f1b")
    ]
    assert times == pytest.approx([3.0 * (4 + 7)] * 2)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_1f1b_holds_no_more_microbatches_than_a_stage_needs(run_ahead: bool) -> None:
    replicas = [1, 2, 1]
    tasks = timetable(replicas, 12, "1f1b", run_ahead)
    stages = [0, 1, 1, 2]
    held = [max(itertools.accumulate(1 if task.kind == "forward" else -1 for task in own)) for own in tasks]
    assert held == [in_flight(replicas, stage, run_ahead) for stage in stages]
    assert held == ([5, 2, 2, 1] if run_ahead else [4, 2, 2, 1])


def test_a_timetable_without_work_ranks_or_schedule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="microbatches=0: a step needs at least 1"):
        timetable([1, 1], 0)
    for replicas in ([], [1, 0]):
        with pytest.raises(ConfigurationError, match="every stage needs at least 1 replica"):
            timetable(replicas, 4)
    with pytest.raises(ConfigurationError, match="schedule='2f2b': accepted are gpipe and 1f1b"):
        timetable([1, 1], 4, "2f2b")


def test_one_rank_of_1f1b_in_full() -> None:
    first = timetable([1, 1], 3)[0]
    assert [(task.kind[0], task.microbatch) for task in first] == [
        *(("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2))
    ]
