"""Who watches a run sees how it goes, and neither changes it nor leaves anything behind."""

import math
import threading

import pytest
from control_world import trained

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.roster import Member
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.window import LONGEST, MOST_FAULTS, WATCH, WATCHER, History
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer, Send
from cnnstrategies.paramserver.drivers.control import Bindings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.line import Watcher
from cnnstrategies.paramserver.security import KeyPair, fingerprint

pytestmark = pytest.mark.light
SOMEBODY = Peer(WATCHER, 0, 0, 99)
HELLO = {"process": 4711, "host": "node1", "endpoint": "", "public_key": ""}
BEAT = {"here": 99, "seen": 99, "notices": 0}


def coordinator_of(timeout=100.0, **options):
    started = Coordinator(CoordinatorSettings("here", 2, 1, timeout=timeout, appear=1e9, **options))
    started.start(100.0)
    return started


def say(coordinator, now, peer, kind, request=0, **fields):
    message = Message(kind, {"session": 0, "floor": request, **fields}, (), request)
    return coordinator.on_message(now, peer, message)


def watch(coordinator, now, **fields):
    """The answer, which is all that comes of a question."""
    (effect,) = coordinator.on_message(now, SOMEBODY, Message(WATCH, fields, request=7))
    assert isinstance(effect, Send)
    assert (effect.to, effect.message.request) == (SOMEBODY, 7)
    return effect.message.fields


def trains(coordinator, now=100.0):
    """Two workers and a server have met, and training has begun."""
    everyone = [Peer("server", 0), Peer("worker", 0), Peer("worker", 1)]
    for peer in everyone:
        say(coordinator, now, peer, "hello", 1, **HELLO)
    for peer in everyone[1:]:
        say(coordinator, now, peer, "collect", 2, sequence=0, operation="start", seal=True)
    for peer in everyone:
        say(coordinator, now, peer, "beat", **BEAT)
    return everyone


def test_members_are_shown_with_what_they_say_of_themselves():
    coordinator = coordinator_of()
    server, zero, one = trains(coordinator)
    figures = {"step": 3, "samples": 24.0, "sent": 1000, "received": 900, "waited": 0.5, "staleness": 2}
    say(coordinator, 102.0, zero, "beat", **{**BEAT, "seen": 100}, figures=figures)
    answer = watch(coordinator, 103.0)
    assert answer["training"] is True
    assert answer["ended"] is None
    assert answer["seconds"] == 3.0
    assert [(member["role"], member["id"], member["life"]) for member in answer["members"]] == [
        one[:3] for one in (server, zero, one)
    ]
    shown = answer["members"][1]
    assert (shown["figures"], shown["measured"], shown["silent"]) == (figures, 2.0, 1.0)
    assert (shown["process"], shown["host"], shown["takes_part"]) == (4711, "node1", True)
    assert answer["members"][2]["figures"] == {}


@pytest.mark.parametrize(
    "figures",
    [
        *([], "step", 5, {"bytes": 1}, {"step": "1"}, {"step": True}, {"step": None}, {"step": [1]}),
        *({"step": -1}, {"step": 1 << 63}, {"step": math.nan}, {"step": math.inf}),
    ],
    ids=str,
)
def test_a_member_that_lies_about_its_figures_is_dropped_and_keeps_what_it_has_said(figures):
    coordinator = coordinator_of()
    _, zero, _ = trains(coordinator)
    say(coordinator, 101.0, zero, "beat", **BEAT, figures={"step": 1})
    with pytest.raises(ControlError):
        say(coordinator, 102.0, zero, "beat", **{**BEAT, "seen": 100}, figures=figures)
    member = next(one for one in coordinator.members if one.peer == zero)
    assert (member.figures, member.measured, member.acknowledged) == ({"step": 1}, 101.0, 99)


def test_figures_travel_with_the_heartbeat_of_a_member():
    run, _ = trained(1)
    run.figures = lambda peer: {"step": 4, "sent": 7.5}
    run.passes(2.0)
    assert run.ask()["members"][0]["figures"] == {"step": 4, "sent": 7.5}


def test_it_is_shown_who_waits_for_whom():
    run, (zero, _) = trained(2)
    run.collect(zero, "metric")
    assert run.ask()["waits"] == [["metric", "worker 0", "worker 1"]]


def test_deaths_and_returns_are_shown_with_the_seconds_since():
    coordinator = coordinator_of(survivable=1, supervised=True)
    server, _, one = trains(coordinator)
    me = Peer("supervision", 0)
    for lost in (server, one):
        told = {"role": lost.role, "id": lost.id, "incarnation": 0, "process": 4711}
        say(coordinator, 101.0, me, "died", 1, **told, how="was killed by SIGKILL", replaced=True)
    say(coordinator, 103.0, Peer("server", 0, 1), "hello", 1, **HELLO)
    answer = watch(coordinator, 104.0)
    assert answer["faults"] == [
        [3.0, "server 0 (process 4711 on node1) was killed by SIGKILL"],
        [3.0, "worker 1 (process 4711 on node1) was killed by SIGKILL"],
        [1.0, "server 0 (process 4711 on node1) has taken the place of the one before"],
    ]
    assert answer["losses"] == 2


def test_a_process_that_was_silent_and_is_then_ended_is_lost_once():
    history = History()
    member = Member(Peer("worker", 1), 1, "here", 0.0)
    history.lost(1.0, member, "was silent for 1 s")
    history.lost(2.0, member, "was killed by SIGKILL")
    assert history.losses == 1
    assert [text for _, text in history.faults] == ["worker 1 (process 1 on here) was silent for 1 s"]


def test_what_is_kept_of_the_past_is_bounded():
    history = History()
    for life in range(1, 100):
        member = Member(Peer("worker", 1, life), 1, "here", 0.0)
        history.came(1.0, member)
        history.lost(2.0, member, "x" * 10 * LONGEST)
    assert len(history.faults) == MOST_FAULTS
    assert all(len(text) <= LONGEST for _, text in history.faults)
    assert history.losses == 99


def test_questions_change_nothing():
    """Two coordinators hear the same, and one is asked in between: they say the same, also of who is silent."""
    alone, watched = coordinator_of(1.0), coordinator_of(1.0)
    for one in (alone, watched):
        trains(one)
    said = []
    for tick in range(60):
        now = 100.0 + tick / 20
        watch(watched, now)
        watch(watched, now + 0.04)
        effects = [
            [*say(one, now, Peer("server", 0), "beat", **BEAT), *one.on_timer(now, "tick")] for one in (alone, watched)
        ]
        assert effects[0] == effects[1]
        said += effects[0]
    assert any(isinstance(one, Send) and one.message.kind == "ended" for one in said), "the workers were silent"
    assert alone.entries == watched.entries


def test_who_watches_can_ask_nothing_else():
    coordinator = coordinator_of()
    trains(coordinator)
    before = watch(coordinator, 100.0)
    for kind in ("hello", "beat", "leave", "end", "died", "stop", "status", "over", "collect"):
        with pytest.raises(ControlError):
            say(coordinator, 100.0, SOMEBODY, kind, 1, **HELLO, role="worker", id=0, message="", clean=True)
    assert watch(coordinator, 100.0) == before


def test_a_coordinator_that_was_started_again_says_so_and_members_hear_of_it():
    run, (worker,) = trained(1)
    run.coordinate(1)
    run.passes(2.0)
    answer = run.ask()
    assert (answer["restarts"], answer["losses"], [one["role"] for one in answer["members"]]) == (1, 1, ["worker"])
    ((_, text),) = answer["faults"]
    assert text == "the coordinator was started again"
    role = run.world.processes[worker[:2]].role
    assert isinstance(role, Participant)
    assert role.losses == 1


def test_only_the_runs_own_key_may_watch():
    run, stranger, own = (KeyPair.create().public for _ in range(3))
    bindings = Bindings(run, set)
    bindings.check(run, SOMEBODY, Message(WATCH))
    bindings.check(run, Peer("worker", 0, 0, fingerprint(own)), Message("register", {"public_key": own}))
    for key in (stranger, own, ""):
        with pytest.raises(ControlError):
            bindings.check(key, SOMEBODY, Message(WATCH))
    with pytest.raises(ControlError):
        bindings.check(run, Peer(WATCHER, 0, 0, fingerprint(own)), Message("register", {"public_key": own}))


def test_over_sockets_who_has_the_key_is_answered_and_nothing_is_kept(tmp_path):
    keys, over = KeyPair.create(), threading.Event()
    settings = CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0)
    service = CoordinatorService(settings, keys)
    thread = threading.Thread(target=service.run, args=(over.is_set,))
    thread.start()
    try:
        with Watcher(settings.endpoint, keys) as watcher:
            for _ in range(3):
                answer = watcher.ask(30.0)
                assert answer is not None
                assert answer.fields["members"] == []
                assert answer.fields["missing"] == ["worker 0"]
        stranger = KeyPair.create()
        with Watcher(settings.endpoint, KeyPair(keys.public, stranger.secret)) as watcher:
            assert watcher.ask(0.2) is None
        with Watcher(settings.endpoint) as watcher:
            assert watcher.ask(0.2) is None
    finally:
        over.set()
        thread.join()
        service.close()
    assert not service.routes
