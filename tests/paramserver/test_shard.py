"""Updates on servers, without sockets: each counts once, and workers see it when no single death can undo it."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cnnstrategies.paramserver.compression import BF16, FP16, OneBit, TopK, as_bytes
from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import NO_STEP, SERVER, Encoding, Header, Kind, Parcel, pack_json, pack_keys
from cnnstrategies.paramserver.server.decision import PATIENCE_SECONDS, Decision
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.synchronous import Synchronous
from tests.paramserver.data_world import MEMBER, Servers, fresh
from tests.paramserver.training import specify

pytestmark = pytest.mark.light

PLAIN = {"name": "SGD", "lr": 0.5}
ALONE: list[dict[str, Any]] = [{"mode": "async"}, {"mode": "ssp", "staleness": 1}]


def pull(run: Servers, step: int, base: int = 0, keys: Sequence[int] | None = None) -> None:
    """Pull the values after a step, each slice from its primary."""
    for server in run.roles:
        wanted = [
            slice_.key for slice_ in run.slices if slice_.servers[0] == server and (keys is None or slice_.key in keys)
        ]
        run.send(Kind.PULL, pack_keys(wanted), step=step, base=base, encoding=Encoding.KEYS, to=(server,))


def pulled(run: Servers) -> set[int]:
    """Return the keys of the slices that were sent to workers."""
    return {header.key for header, _, _ in run.to_workers if header.kind == Kind.PULLED}


def keys(run: Servers) -> set[int]:
    return {slice_.key for slice_ in run.slices}


def test_a_worker_sees_an_update_when_every_copy_has_it() -> None:
    run = fresh(specify(PLAIN, 1, servers=2, replication=2))
    run.lost = lambda sender, header: header.kind == Kind.ACKNOWLEDGE
    run.push(0)
    pull(run, 1)
    assert run.versions(0) == run.versions(1) == {1}
    assert pulled(run) == set()
    run.lost = lambda sender, header: False
    for _ in range(3):  # Each server hears that it has missed messages, and receives them again.
        run.look(1.0)
    assert pulled(run) == keys(run)


def test_a_server_reports_when_a_late_backup_has_all_copies() -> None:
    """Check the report's time: before it, the run does not survive the reporting server's death."""
    run = fresh(specify(PLAIN, 1, servers=2, replication=2))
    run.follow(View(2, run.view.servers, run.view.workers, begun=2))
    run.without(1)
    run.serve(1)
    last = max(run.roles[1].store.slices)
    run.lost = lambda sender, header: header.kind == Kind.COPY and header.key == last
    back = (run.view.servers[0], ServerInfo(1, "1", since=4))
    run.follow(View(4, back, run.view.workers, begun=2))
    for _ in range(3):
        run.look(1.0)
    assert run.versions(1) == {0, -1}
    filled = "server 1 now has copies of all slices that it backs up for server 0"
    assert filled not in run.reports
    run.lost = lambda sender, header: False
    for _ in range(3):
        run.look(1.0)
    assert run.versions(1) == {0}
    assert run.reports.count(filled) == 1


def test_a_copy_counts_only_after_its_primary_has_sent_it() -> None:
    """Use a copy with first values of a worker, which may differ from the primary's values of the same version."""
    run = fresh(specify(PLAIN, 1, servers=2, replication=2))
    run.without(1)
    run.serve(1, run.store(1, 0))
    run.lost = lambda sender, header: header.kind == Kind.COPY
    run.follow(View(3, (run.view.servers[0], ServerInfo(1, "1", since=3)), run.view.workers))
    run.push(0)
    assert run.versions(0) == {1}
    assert run.versions(1) == {0}


def test_a_copy_applies_a_repeated_update_once() -> None:
    run = fresh(specify(PLAIN, 1, servers=2, replication=2))
    slice_ = next(candidate for candidate in run.slices if candidate.servers[0] == 0)
    copies, payload = run.roles[1].shard.copies, as_bytes(torch.ones(slice_.numel, dtype=slice_.dtype))
    relay = Header(Kind.RELAY, SERVER, 0, 1, Encoding.DENSE, key=slice_.key, length=len(payload), weight=1.0)
    for _ in range(2):
        copies.relayed(0, relay, payload, run.options, 0)
    assert run.roles[1].store.versions[slice_.key] == 1
    assert run.values(1) == {0.0, -0.5}


@pytest.mark.parametrize("mode", ALONE, ids=["async", "ssp"])
def test_a_push_is_dropped_until_the_workers_earlier_pushes_have_arrived(mode: dict[str, Any]) -> None:
    """Check a server that has just started, and a worker that leaves and comes back."""
    run = fresh(specify(PLAIN, 1, **mode), workers=())
    dropped = run.roles[0].dropped
    reason = "the worker's pushes of earlier steps have not arrived"
    run.push(0)
    assert run.versions(0) == {0}
    assert dropped[reason] == len(run.slices)
    for first, steps, missed in ((1, (1, 2), 4), (4, (4, 4), 6)):  # The worker leaves and comes back.
        run.say_hello(MEMBER | {"first": first}, first)
        for step in steps:
            run.push(step)
        dropped.clear()
        run.push(missed)
        assert dropped[reason] == len(run.slices)
    assert run.versions(0) == {3}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_come_in_the_encoding_that_the_worker_asks_for(mode: Any) -> None:
    """Use all encodings: a pull's base holds the encoding above its lowest bit, 0 for the specification's encoding."""
    run = fresh(specify(PLAIN, 1, mode=mode, pull_compression="bf16"))
    whole, got = 1, []
    for base in (0, Encoding.DENSE << 1, FP16.encoding << 1, BF16.encoding << 1, whole):
        run.to_workers.clear()
        pull(run, 0, base, keys=[0])
        got += [header.encoding for header, _, _ in run.to_workers if header.kind == Kind.PULLED]
    assert got == [BF16.encoding, Encoding.DENSE, FP16.encoding, BF16.encoding, Encoding.DENSE]
    for base in (TopK.encoding << 1, OneBit.encoding << 1, Encoding.KEYS << 1, 1 << 20):
        pull(run, 0, base, keys=[0])
    assert run.roles[0].dropped["the pull requests an encoding that this run does not use for pulls"] == 4


def test_message_numbers_outlive_a_connection_and_begin_again_with_a_new_server() -> None:
    outbox = Outbox(0, session=1)
    numbers = []
    for view, info in enumerate(
        [ServerInfo(1, "ipc://a", since=1), ServerInfo(1, "ipc://b", since=1), ServerInfo(1, "ipc://b", since=3)]
    ):
        outbox.follow(View(view + 1, (info,), ()))
        outbox.to_server(1, Kind.PING)
        numbers += [effect.header.sequence for effect in outbox.take() if isinstance(effect, Parcel)]
    assert numbers == [1, 2, 1]


# Steps that a leader has decided: when the leader dies, and when another server begins to lead

SERVERS = (ServerInfo(0, "0", since=5), ServerInfo(1, "1", since=6))
NEW: dict[str, Any] = MEMBER | {"given": False}


def servers_with_a_new_leader(version: int, workers: int = 1) -> Servers:
    """Return two servers with slices of a version and the last decision; the first server now leads."""
    run = Servers(specify(PLAIN, workers, servers=2))
    for number in range(2):
        run.serve(number, run.store(number, version))
        mode = run.roles[number].mode
        assert isinstance(mode, Synchronous)
        mode.adopt(Decision(version - 1, ((0, 0),), run.options, 1.0))
    run.follow(View(6, SERVERS, run.view.workers))
    return run


def first_steps(run: Servers) -> list[int]:
    """Return the steps with which the leader told workers to begin."""
    return [step for _, text, step in run.welcomes() if text.get("leader") and step]


def test_a_newcomer_is_told_where_to_begin_once_all_workers_have_reported() -> None:
    run = servers_with_a_new_leader(3, workers=2)
    run.say_hello(NEW, NO_STEP, worker=1)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert first_steps(run) == []
    run.say_hello(MEMBER, 3)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert first_steps(run) == [3, 3]


def test_a_newcomer_waits_a_bounded_time_for_silent_workers() -> None:
    run = servers_with_a_new_leader(3, workers=2)
    for waited in (0.0, 1000.0, *[PATIENCE_SECONDS / 4] * 4):  # 1000 s: the machine slept, so workers could not report.
        run.say_hello(NEW, NO_STEP, worker=1)
        assert first_steps(run) == []
        run.look(waited)
    run.say_hello(NEW, NO_STEP, worker=1)
    assert first_steps(run) == [3]


def test_a_vote_under_an_older_view_does_not_count() -> None:
    """Deliver a vote late: under the new view, its sender may have to report different pushes."""
    run = fresh(specify(PLAIN, 1, servers=2))
    run.lost = lambda sender, header: header.kind == Kind.VOTE
    run.push(0)
    (vote,) = [header for _, header, _ in run.missed if header.kind == Kind.VOTE]
    run.follow(replace(run.view, number=2), servers=(0,))
    run.roles[0].on_message(0.0, b"", "", vote, memoryview(pack_json({"complete": [(0, 0)]})))
    run.look()
    assert run.versions(0) == {0}
    run.follow(run.view)
    assert run.versions(0) == {1}


def test_a_server_without_slices_learns_how_far_workers_are() -> None:
    """Use a server that has missed the leader's decisions."""
    run = Servers(specify(PLAIN, 1, servers=7, slice_bytes=1 << 20))
    run.serve(6)
    assert not run.roles[6].store.slices
    run.follow(run.view)
    run.say_hello(MEMBER, 8)
    run.begin(8)
    votes = [(to, text) for to, header, text in run.missed if header.kind == Kind.VOTE]
    assert votes == [(0, {"complete": [[8, 0]]})]


def trained(lost: Collection[Kind] = ()) -> Servers:
    """Return two servers after a step of two workers in which some kinds of messages between servers were lost."""
    run = fresh(specify(PLAIN, 2, servers=2, replication=2), workers=(0, 1))
    run.push(0, 0, 1.0)
    run.lost = lambda sender, header: header.kind in lost
    run.push(0, 1, 3.0)
    assert -1.0 in run.values(0), "the leader has made the step"
    return run


@pytest.mark.parametrize("lost", [(Kind.DECIDE, Kind.PING), (Kind.DECIDE, Kind.RELAY)])
def test_a_step_has_the_same_workers_on_all_slices_if_the_decision_is_lost(
    lost: tuple[Kind, ...],
) -> None:
    """Lose the decision, and let the leader die together with a worker whose pushes the step contains."""
    run = trained(lost=lost)
    if Kind.RELAY in lost:
        run.look(1.0)  # The leader sends copies in place of the updates that its backup has missed.
    run.without(0, workers=(1,))
    run.push(0)
    assert run.values(1) == {-1.0}


def test_first_values_are_not_accepted_after_a_step() -> None:
    """Offer first values after a step: accepting them would reset a part of the parameters."""
    run = trained()
    run.serve(1)
    run.lost = lambda sender, header: header.kind in (Kind.COPY, Kind.PING)
    run.follow(View(2, (run.view.servers[0], ServerInfo(1, "1", since=2)), run.view.workers))
    run.without(0)
    run.initialise()
    assert run.versions(1) == {-1}
