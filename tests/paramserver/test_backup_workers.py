"""Steps that do not wait for all workers: a late gradient is dropped, and its worker goes on with the others."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from data_world import MEMBER, fresh
from roles import Roles, join
from test_leader import snapshots
from test_shard import pull, pulled
from torch import Tensor
from training import SGD, Replica, batches, specify, train_alone

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.messages import Kind, unpack_json
from cnnstrategies.paramserver.server.quorum import Attendance

pytestmark = pytest.mark.light
STEPS = 5


def replicas(run: Roles) -> list[Replica]:
    """Two workers with their networks, that train from now on: in this process, one after the other."""
    both = [Replica(partial(run.connect, number), SGD) for number in range(2)]
    join([replica.worker for replica in both])
    return both


@pytest.mark.parametrize("options", [{}, {"servers": 2, "replication": 2}, {"servers": 2, "clip_norm": 0.3}], ids=str)
def test_steps_that_one_of_two_makes_alone_are_those_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """Nobody waits for the other, whose gradient of the first step comes after the last one."""

    def clip(parameters: list[Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, options["clip_norm"])

    data = batches(STEPS + 1, 12)
    with Roles(tmp_path, specify(SGD, 2, backup_workers=1, **options)) as run:
        quick, late = replicas(run)
        for images, targets in data[:STEPS]:
            quick.step(images, targets)
        quick.worker.wait_all()
        expected, _ = train_alone(SGD, data[:STEPS], clip if "clip_norm" in options else None)
        assert_equal(quick, expected)

        assert not late.worker.late
        late.step(*data[STEPS])
        late.worker.wait_all()
        assert (late.worker.step, late.worker.late, late.worker.counters.dropped) == (1, True, 1)
        assert versions_told(late.worker) == {STEPS}, "not only those that it has waited for"
        assert late.worker.catch_up() == STEPS - 1
        assert (late.worker.step, late.worker.late, late.worker.counters.dropped) == (STEPS, False, STEPS)
        assert versions_told(late.worker) == set(), "its step tells"
        assert late.worker.counters.steps == STEPS
        assert_equal(late, expected)

        late.scheduler.last_epoch = quick.scheduler.last_epoch
        for group, others in zip(late.optimizer.param_groups, quick.optimizer.param_groups, strict=True):
            group["lr"] = others["lr"]
        late.step(*data[STEPS])
        late.worker.wait_all()
        assert late.worker.counters.dropped == STEPS, "this one comes first"
        expected, _ = train_alone(SGD, data, clip if "clip_norm" in options else None)
        assert_equal(late, expected)
        assert quick.worker.counters.dropped == 0


def versions_told(worker: Worker) -> set[int]:
    """Versions of slices that a worker says to servers that it had, beside the step that it is at."""
    role = worker.role
    role.take()
    for server in role.view.servers:
        role.hello(server.id)
    said = [unpack_json(memoryview(one.payload), one.header) for one in role.take() if one.header.kind == Kind.HELLO]
    return {version for one in said for _, version in one["had"]}


def assert_equal(replica: Replica, expected: dict[str, Tensor]) -> None:
    for name, value in replica.network.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_a_worker_that_makes_up_all_steps_is_answered_at_once_and_none_of_them_counts(tmp_path: Path) -> None:
    """One that never asks whether it is late."""
    data = batches(STEPS, 12)
    with Roles(tmp_path, specify(SGD, 2, backup_workers=1)) as run:
        for replica in (both := replicas(run)):
            for images, targets in data:
                replica.step(images, targets)
            replica.worker.wait_all()
        late = both[1]
        assert (late.worker.step, late.worker.counters.dropped) == (STEPS, STEPS)
        assert_equal(late, train_alone(SGD, data)[0])


def test_who_has_missed_a_step_is_known_as_far_as_decisions_are() -> None:
    attendance = Attendance()
    assert not attendance.missed(0, 0)
    attendance.note(0, (0, 1))
    attendance.note(1, (1,))
    assert [attendance.missed(0, step) for step in range(3)] == [False, True, False]
    attendance.note(7, (1,))
    attendance.note(7, (1,))
    assert not attendance.missed(0, 5), "this server has not heard who made the steps between"
    attendance.note(8, (0, 1))
    assert [attendance.missed(1, step) for step in (7, 8)] == [False, False]
    attendance.note(9, (1,))
    assert [attendance.missed(0, step) for step in (8, 9, 10)] == [False, True, False]


def test_a_late_worker_sees_no_version_that_a_death_can_take_back() -> None:
    """It has asked for an older one, which every copy has; what it is sent is what is there."""
    run = fresh(specify(SGD, 2, servers=2, replication=2, backup_workers=1), workers=(0, 1))
    run.push(0, worker=1)
    run.lost = lambda sender, header: header.kind == Kind.ACKNOWLEDGE
    run.push(1, worker=1)
    pull(run, 1)
    assert run.versions(0) == {2}
    assert pulled(run) == set()
    run.lost = lambda sender, header: False
    for _ in range(3):
        run.look(1.0)
    assert pulled(run) == {slice_.key for slice_ in run.slices}


# What a server that has come back hears of a late worker only, since the others have died.


def test_what_a_late_worker_did_not_wait_for_and_a_snapshot_lacks_is_counted() -> None:
    run = snapshots(3, 2, workers=2, backup_workers=1)
    keys = [*run.roles[1].store.slices]
    run.say_hello(MEMBER | {"had": [[key, 5] for key in keys]}, 2)
    assert run.versions(1) == {5}
    assert run.roles[1].handlers.lost_updates == 3


def test_a_server_does_not_stay_at_a_step_that_a_late_worker_would_be_too_late_for() -> None:
    """The other one knows a later decision: those who could push what comes before are past that, here all dead."""
    run = snapshots(6, 2, workers=2, decided=True, life=1, backup_workers=1)
    for worker in (0, 1, 0):
        run.say_hello(MEMBER | {"had": []}, 2, worker=worker)
    assert run.versions(1) == {6}
    assert run.roles[1].handlers.lost_updates == 3, "the last one is made without its members"


def test_a_late_worker_does_not_hold_a_leader_that_knows_of_no_decision() -> None:
    """It decides once more what that one pushes, for the case that it lacks somewhere, and goes on with the others."""
    run = snapshots(6, 6, workers=3, backup_workers=1)
    for worker, step in ((0, 6), (1, 6), (2, 3)):
        run.say_hello(MEMBER | {"had": []}, step, worker=worker)
    run.push(3, worker=2)
    assert run.versions(0) == run.versions(1) == {6}
    for worker in (0, 1):
        run.push(6, worker=worker)
    assert run.versions(0) == run.versions(1) == {7}
