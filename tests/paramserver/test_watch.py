"""Who watches a run sees how it goes, and neither changes it nor leaves anything behind."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from control_world import Run, trained

from cnnstrategies.paramserver.coordinator.members import LONGEST, MOST_FAULTS, History, Member
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.places import Watcher
from cnnstrategies.paramserver.security import KeyPair

pytestmark = pytest.mark.light


def test_members_are_shown_with_what_they_say_of_themselves() -> None:
    run, (zero, _) = trained(2, 1)
    figures = {"step": 3, "samples": 24.0, "sent": 1000, "received": 900, "waited": 0.5, "staleness": 2}
    run.figures = lambda peer: figures if peer == zero else {}
    run.passes(2.0)
    answer = run.ask()
    assert (answer["training"], answer["ended"], answer["missing"]) == (True, None, [])
    assert answer["seconds"] == pytest.approx(run.world.now)
    assert [(one["role"], one["id"], one["life"]) for one in answer["members"]] == [
        ("server", 0, 0), ("worker", 0, 0), ("worker", 1, 0),
    ]  # fmt: skip
    _, shown, other = answer["members"]
    assert (shown["process"], shown["host"], shown["takes_part"], shown["figures"]) == (4711, "here", True, figures)
    assert 0 < shown["silent"] <= 1.0
    assert shown["measured"] == pytest.approx(answer["seconds"] - shown["silent"])
    assert other["figures"] == {}


def test_a_member_with_false_figures_is_dropped_not_its_words() -> None:
    run, (worker,) = trained(1)
    beat = {"session": 0, "here": 9, "seen": 9, "notices": 0}
    run.coordinator.on_message(run.world.now, worker, Message("beat", {**beat, "figures": {"step": 1}}))
    values = ("1", True, None, [1], -1, 1 << 63, math.nan, math.inf)
    for figures in ([], "step", 5, {"bytes": 1}, *({"step": value} for value in values)):
        with pytest.raises(ControlError):
            run.coordinator.on_message(run.world.now, worker, Message("beat", {**beat, "seen": 10, "figures": figures}))
    (member,) = run.coordinator.members
    assert (member.figures, member.acknowledged) == ({"step": 1}, 9)


def test_it_is_shown_who_waits_for_whom() -> None:
    run, (zero, _) = trained(2)
    run.collect(zero, "metric")
    assert run.ask()["waits"] == [["metric", "worker 0", "worker 1"]]


def test_deaths_and_returns_are_shown_with_the_seconds_since() -> None:
    run, (_, one) = trained(2, 1, survivable=1)
    for lost in (Peer("server", 0, 0, 7), one):
        run.died(lost, replaced=True)
    run.passes(2.0)
    run.member("server", 0, life=1)
    answer = run.ask()
    assert [text for _, text in answer["faults"]] == [
        "server 0 (process 4711 on here) was killed",
        "worker 1 (process 4711 on here) was killed",
        "server 0 (process 4711 on here) has taken the place of the one before",
    ]
    died, _, came = (seconds for seconds, _ in answer["faults"])
    assert 2.0 < died - came < 2.1
    assert answer["losses"] == 2


def test_a_process_that_is_silent_and_then_ended_is_lost_once() -> None:
    history = History()
    member = Member(Peer("worker", 1), 1, "here", 0.0)
    history.lost(1.0, member, "was silent for 1 s")
    history.lost(2.0, member, "was killed by SIGKILL")
    assert history.losses == 1
    assert [text for _, text in history.faults] == ["worker 1 (process 1 on here) was silent for 1 s"]


def test_what_is_kept_of_the_past_is_bounded() -> None:
    history = History()
    for life in range(99):
        history.lost(2.0, Member(Peer("worker", 1, life), 1, "here", 0.0), "x" * 10 * LONGEST)
    assert len(history.faults) == MOST_FAULTS
    assert all(len(text) <= LONGEST for _, text in history.faults)
    assert history.losses == 99


def test_questions_change_nothing() -> None:
    """Two coordinators hear the same, and one is asked in between: they say the same, also of who is silent."""

    def run(watched: bool) -> tuple[Run, list[Any]]:
        world, (zero, _) = trained(2, 1)
        world.strike("pause", zero, 1000.0)
        for _ in range(60):
            world.passes(0.5)
            if watched:
                world.ask()
        return world, world.told

    (alone, heard), (watched, same) = run(False), run(True)
    assert heard == same
    assert any(message.kind == "ended" for _, message in heard), "a worker was silent"
    assert alone.coordinator.entries == watched.coordinator.entries


def test_who_watches_can_ask_nothing_else() -> None:
    run, _ = trained(2, 1)
    before = run.ask()
    for kind in ("hello", "beat", "leave", "end", "died", "stop", "status", "over", "collect"):
        with pytest.raises(ControlError):
            run.ask(kind, session=0, role="worker", id=0, message="", clean=True)
    assert run.ask() == before


def test_members_hear_of_a_restarted_coordinator() -> None:
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


def test_who_has_the_key_is_answered_and_nothing_is_kept(tmp_path: Path) -> None:
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
