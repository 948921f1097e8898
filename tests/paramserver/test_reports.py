import tracemalloc

import pytest

from cnnstrategies.paramserver.server.clocks import StaleClock, SyncClock
from cnnstrategies.paramserver.server.decision import Reports

pytestmark = pytest.mark.light


def test_what_a_server_had_under_an_older_view_does_not_count_and_of_a_newer_one_it_counts_then() -> None:
    reports = Reports()
    reports.follow(3, [0, 1])
    reports.add(0, 3, {(7, 1)})
    reports.add(1, 2, {(7, 1)})
    assert reports.complete(7) is None, "server 1 has not reported"
    for server in (0, 1):
        reports.add(server, 4, {(8, 1)})
    assert reports.complete(8) is None
    reports.follow(4, [0, 1])
    assert reports.complete(7) == set(), "every server reports anew"
    assert reports.complete(8) == {1}


class Number(int):
    """A worker's number that counts how often one is looked at."""

    looks = 0

    def __hash__(self) -> int:
        Number.looks += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Number.looks += 1
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __lt__(self, other: int) -> bool:
        Number.looks += 1
        return int.__lt__(self, other)


def looks_in_a_step(workers: int, servers: int) -> int:
    """Of the leader at workers' numbers, for the votes that come worker by worker, as pushes get complete."""
    reports, clock = Reports(), SyncClock(workers)
    numbers = [Number(worker) for worker in range(workers)]
    reports.follow(1, range(servers))
    for worker in numbers:
        clock.join(worker)
    for server in range(servers):
        reports.add(server, 1, ())
    Number.looks = 0
    ready = None
    for worker in numbers:
        for server in range(servers):
            assert ready is None
            reports.add(server, 1, {(0, worker)})
            complete = reports.complete(0)
            assert complete is not None
            ready = clock.ready(complete)
    assert ready == frozenset(range(workers))
    return Number.looks


def test_a_vote_costs_the_leader_the_same_for_any_number_of_workers() -> None:
    few, many = (looks_in_a_step(workers, 4) for workers in (100, 1600))
    assert few >= 100
    assert many < 1.1 * 16 * few, f"{few} looks for 100 workers, {many} for 1600"


def test_nothing_grows_with_the_number_of_steps() -> None:
    sync, stale, reports = SyncClock(8), StaleClock(1, 8), Reports()
    reports.follow(1, [0])
    for worker in range(8):
        sync.join(worker)
        stale.join(worker)

    def run(first: int, last: int) -> None:
        for step in range(first, last):
            reports.add(0, 1, {(step, worker) for worker in range(8)})
            sync.decide(step, range(8))
            reports.forget_before(step + 1)
            for worker in range(8):
                stale.finished(worker, step + 1)

    run(0, 1500)
    tracemalloc.start()
    run(1500, 4500)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 300_000, f"{grown} bytes in 3000 steps"
