"""Tests of the stopwatch for a rank's own time, on a CPU and with simulated events of a GPU."""

from types import SimpleNamespace

import pytest
import torch

from cnnstrategies.runtime import stopwatch
from cnnstrategies.runtime.stopwatch import Measured, Stopwatch

pytestmark = pytest.mark.light


class Clock:
    """A clock that a test sets, and a GPU whose events are recorded at the time of the clock.

    Attributes:
        now: Time in seconds.
        reached: Time up to which the GPU has finished its work.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reached = 0.0, 0.0
        monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.at = self.clock.now

    def query(self) -> bool:
        return self.at <= self.clock.reached

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_waits_are_measured_apart_from_a_ranks_own_time(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch(torch.device(device, 0))
    watch.begin_waiting()  # Before the start, a wait does not count.
    for now, act in (
        (1.0, watch.begin),
        (2.0, watch.begin_waiting),
        (3.0, watch.begin_waiting),  # The wait that is open goes on.
        (5.0, watch.end_waiting),
        (5.5, watch.end_waiting),
        (6.0, watch.begin_waiting),
        (8.0, watch.end_waiting),
        (11.0, lambda: watch.end(4)),
    ):
        clock.now = now
        act()
    clock.reached = 11.0
    (measured,) = watch.take()
    assert measured == Measured(seconds=10.0, waited=5.0, work=4)
    assert measured.own == 5.0
    assert watch.take() == []


def test_steps_that_the_gpu_has_not_finished_are_returned_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watch = Stopwatch(torch.device("cuda", 0))
    for _ in range(3):
        watch.begin()
        clock.now += 2.0
        watch.end()
    clock.reached = 2.0
    assert [measured.seconds for measured in watch.take()] == [2.0]
    clock.reached = 6.0
    assert [measured.seconds for measured in watch.take()] == [2.0, 2.0]


def test_discarded_steps_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    watch = Stopwatch(torch.device("cpu"))
    watch.begin()
    watch.discard()
    watch.end()
    assert watch.take() == [], "a validation ran in the step"
    watch.begin()
    watch.end()
    watch.clear()
    assert watch.take() == []
