"""A coordinator that follows one that was killed: whom it waits for, and who may go before the others know enough."""

from collections.abc import Callable
from typing import Any

import pytest

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.reporter import Reporter
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Call, Effects, Message, Peer, Return, Role, Send
from cnnstrategies.paramserver.core.view import View

pytestmark = pytest.mark.light
SETTINGS: dict[str, Any] = {"timeout": 10.0, "supervised": True, "restartable": True, "supervisor": 5}


class Run:
    """Roles whose messages come at once, as long as nobody holds them back."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.now, self.number = 0.0, 0
        self.roles: dict[Peer, Role] = {}
        self.returned: dict[tuple[Peer, int], Message | str] = {}
        self.told: list[tuple[Peer, Message]] = []
        self.holds: Callable[[Peer, Message], bool] = lambda peer, message: False
        self.coordinate(0)

    def coordinate(self, term: int) -> None:
        self.term = Peer("coordinator", 0, term)
        self.coordinator = Coordinator(CoordinatorSettings("here", self.workers, 0, term=term, **SETTINGS))
        self.act(self.term, self.coordinator.start(self.now))

    def join(self, role: Role, peer: Peer) -> Peer:
        self.roles[peer] = role
        self.act(peer, role.start(self.now))
        return peer

    def worker(self, identity: int, life: int = 0) -> Peer:
        address = Address("here", "worker", identity, life, timeout=10.0)
        hello = {"process": 1, "host": "here", "endpoint": "", "public_key": ""}
        participant = Participant(address, 7, hello)
        return self.join(participant, participant.peer)

    def call(self, peer: Peer, kind: str, **fields: Any) -> Callable[[], Message | str | None]:
        self.number += 1
        number = self.number
        self.act(peer, self.roles[peer].on_call(self.now, Call(number, kind, fields)))
        return lambda: self.returned.get((peer, number))

    def collect(
        self, peer: Peer, operation: str = "gather", seal: bool = False, boundary: bool = False
    ) -> Callable[[], Message | str | None]:
        return self.call(peer, "collect", operation=operation, seal=seal, boundary=boundary)

    def beat(self, *peers: Peer) -> None:
        self.now += 0.5
        for peer in peers:
            self.act(peer, self.roles[peer].on_timer(self.now, "beat"))
            self.act(peer, self.roles[peer].on_timer(self.now, "requests"))
        self.act(self.term, self.coordinator.on_timer(self.now, "tick"))

    def act(self, peer: Peer, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Return):
                self.returned[peer, effect.call] = effect.value
            elif isinstance(effect, Send) and peer == self.term:
                self.told.append((effect.to, effect.message))
                if effect.to in self.roles and not self.holds(effect.to, effect.message):
                    self.act(effect.to, self.roles[effect.to].on_message(self.now, peer, effect.message))
            elif isinstance(effect, Send):
                self.act(self.term, self.coordinator.on_message(self.now, peer, effect.message))


def trained(workers: int) -> tuple[Run, list[Peer]]:
    """A run whose workers have begun to train."""
    run = Run(workers)
    peers = [run.worker(one) for one in range(workers)]
    for peer in peers:
        run.collect(peer, "start", seal=True)
    return run, peers


def test_who_leaves_is_kept_until_the_others_know_what_it_alone_could_tell() -> None:
    run, (first, second) = trained(2)
    run.holds = lambda peer, message: peer == second and message.fields.get("sequence") == 1
    run.collect(first)
    lost = run.collect(second)
    leaving = run.call(first, "leave")
    run.beat(first)
    assert leaving() is None
    run.coordinate(1)
    run.holds = lambda peer, message: False
    run.beat(second)
    assert run.coordinator.recovers, "who leaves is a member still, and has not reported"
    for _ in range(4):
        run.beat(first, second)
    assert isinstance(told := lost(), Message)
    assert told.fields["ids"] == [0, 1], "the result that only the first knew"
    assert leaving() is not None


def test_who_leaves_is_kept_until_somebody_else_has_the_view_without_it() -> None:
    run, (first, second) = trained(2)
    run.beat(second)
    run.holds = lambda peer, message: message.kind == "view"
    leaving = run.call(first, "leave")
    run.beat(first)
    assert leaving() is None, "the next coordinator would wait for it, and miss it"
    run.holds = lambda peer, message: False
    run.beat(second)
    run.beat(second)
    run.beat(first)
    assert leaving() is not None


def test_a_coordinator_that_is_no_more_is_not_heard() -> None:
    run, (first, second) = trained(2)
    waits = run.collect(first)
    late = Message("done", {"sequence": 1, "ids": [0, 1], "sizes": [0, 0], "view": 0, "admitted": []}, (), 3)
    role = run.roles[first]
    assert isinstance(role, Participant)
    (request,) = [one.message.request for one in role.asking.open.values()]
    run.coordinate(1)
    run.beat(first)
    run.act(first, role.on_message(run.now, Peer("coordinator", 0, 0), late._replace(request=request)))
    assert waits() is None, "the next coordinator may decide otherwise: nobody has told it"
    run.collect(second)
    run.beat(first, second)
    run.beat(first, second)
    assert isinstance(waits(), Message)


def test_a_restart_waits_for_members_but_not_for_those_that_a_supervision_knows_to_have_ended() -> None:
    run, (first, second, _) = trained(3)
    supervision = run.join(Reporter(0), Peer("supervision", 0, 0, 5))
    run.holds = lambda peer, message: message.kind == "view"
    fields = {"role": "worker", "id": 2, "incarnation": 0, "process": 1, "how": "was killed", "replaced": False}
    run.call(supervision, "died", **fields)
    run.holds = lambda peer, message: False
    run.coordinate(1)
    run.beat(first)
    assert run.coordinator.recovers, "two members of the newest view have not reported"
    run.beat(second)
    assert run.coordinator.recovers
    run.call(supervision, "status")
    assert not run.coordinator.recovers, "the supervision tells each coordinator anew"
    assert [one.peer for one in run.coordinator.members] == [first, second]


def test_who_waits_for_others_and_asks_is_not_silent() -> None:
    """It has no view yet, and sends no heartbeats."""
    run = Run(2)
    run.coordinate(1)
    first = run.worker(0)
    for _ in range(25):
        run.beat(first)
    assert run.coordinator.recovers, "nobody knows a view, and the second has not come"
    run.holds = lambda peer, message: peer == first
    second = run.worker(1)
    run.beat()
    assert [one.peer for one in run.coordinator.members] == [first, second]


def test_who_reports_when_a_coordinator_has_given_up_waiting_meets_one_that_has_ended_the_run() -> None:
    """It would be a new member of a run that the coordinator knows nothing of."""
    run, (worker,) = trained(1)
    run.holds = lambda peer, message: True
    run.coordinate(1)
    for _ in range(2 * 600):  # CoordinatorSettings.appear
        run.beat()
    run.now += 0.1  # Before the next tick.
    run.act(worker, run.roles[worker].on_timer(run.now, "beat"))
    run.holds = lambda peer, message: False
    run.told.clear()
    run.act(worker, run.roles[worker].on_timer(run.now, "beat"))
    assert any("worker 0 did not appear" in str(message.fields.get("message")) for _, message in run.told)


def test_a_hello_to_the_coordinator_before_is_not_taken_for_a_report_however_late_it_comes() -> None:
    run, (first, second) = trained(2)
    fields = {"session": 0, "floor": 1, "process": 1, "host": "here", "endpoint": "", "public_key": ""}
    run.coordinate(1)
    run.holds = lambda peer, message: peer == second
    run.act(run.term, run.coordinator.on_message(run.now, second, Message("hello", fields, (), 1)))
    run.beat(first)
    assert run.coordinator.recovers, "the second has not told yet what it knows"
    run.holds = lambda peer, message: False
    run.beat(second)
    assert not run.coordinator.recovers
    assert [one.peer for one in run.coordinator.members] == [first, second]


def test_nobody_forgets_what_it_is_to_hand_over() -> None:
    run, peers = trained(2)
    for peer in peers:
        run.collect(peer)
    run.coordinate(1)
    run.holds = lambda peer, message: message.kind == "lacks"
    run.beat(*peers)
    assert not run.coordinator.recovers
    waits = [run.collect(peer) for peer in peers]
    run.holds = lambda peer, message: False
    run.beat(*peers)
    assert all(isinstance(told(), Message) for told in waits)
    run.told.clear()
    run.beat(*peers)
    assert "lacks" not in [message.kind for _, message in run.told]


def test_who_was_taken_for_dead_is_not_asked_for_what_others_know_too() -> None:
    run, (first, second, third) = trained(3)
    run.holds = lambda peer, message: peer == first and message.fields.get("sequence") == 1
    lost, *_ = [run.collect(peer) for peer in (first, second, third)]
    for _ in range(25):
        run.beat(first, third)
    assert second not in [one.peer for one in run.coordinator.members]
    run.coordinate(1)
    run.holds = lambda peer, message: False
    for peer in (second, first, third, first, third):
        run.beat(peer)
    assert isinstance(lost(), Message), "the third knows it, too"


def test_who_was_taken_for_dead_is_no_member_after_a_restart_either() -> None:
    run, (first, second, third) = trained(3)
    for _ in range(25):
        run.beat(first, second)
    assert third not in [one.peer for one in run.coordinator.members]
    run.coordinate(1)
    run.told.clear()
    run.beat(third, first, second)
    refused = [message.fields["message"] for peer, message in run.told if peer == third and message.kind == "refused"]
    assert refused
    assert "counts as dead" in refused[0]
    assert [one.peer for one in run.coordinator.members] == [first, second]


def test_nobody_is_told_who_was_let_in_before_the_next_coordinator_could_be_told_too() -> None:
    """In a run without servers; else these have seen the view, and tell it."""
    run, (first, _) = trained(2)
    supervision = run.join(Reporter(0), Peer("supervision", 0, 0, 5))
    died = {"role": "worker", "id": 1, "incarnation": 0, "process": 7, "how": "was killed", "replaced": True}
    run.call(supervision, "died", **died)
    again = run.worker(1, life=1)
    run.holds = lambda peer, message: message.kind == "view"
    started, boundary = run.collect(again, "start", seal=True), run.collect(first, "boundary", boundary=True)
    run.coordinate(1)
    run.holds = lambda peer, message: False
    for _ in range(3):
        run.beat(first, again)
    assert started() is None, "it would take part in what the others do without it"
    assert isinstance(alone := boundary(), Message)
    assert alone.fields["admitted"] == []
    boundary = run.collect(first, "boundary", boundary=True)
    for _ in range(3):
        run.beat(first, again)
    for result in (started(), boundary()):
        assert isinstance(result, Message)
        assert result.fields["admitted"] == [1]
    for result in [run.collect(peer) for peer in (again, first)]:
        assert isinstance(told := result(), Message), told
        assert told.fields["ids"] == [0, 1]


def test_one_that_comes_again_is_let_in_when_the_others_have_made_the_end_of_the_set_up_once_more() -> None:
    """The coordinator was killed when all had contributed, and before it had told them."""
    run = Run(3)
    first, lost, slow = (run.worker(one) for one in range(3))
    run.holds = lambda peer, message: "sequence" in message.fields
    started = [run.collect(peer, "start", seal=True) for peer in (first, lost, slow)]
    supervision = run.join(Reporter(0), Peer("supervision", 0, 0, 5))
    died = {"role": "worker", "id": 1, "incarnation": 0, "process": 7, "how": "was killed", "replaced": True}
    run.coordinate(1)
    run.holds = lambda peer, message: peer == slow and message.kind in ("done", "unknown")
    run.call(supervision, "died", **died)
    run.beat(first, slow, supervision)
    again = run.worker(1, life=1)
    run.beat(again)
    joined = run.collect(again, "start", seal=True)
    run.holds = lambda peer, message: False
    for _ in range(3):
        run.beat(first, slow, again, supervision)
    for made in (started[0](), started[2]()):
        assert isinstance(made, Message), made
        assert made.fields["ids"] == [0, 2]
    for peer in (first, slow):
        run.collect(peer, "boundary", boundary=True)
    for _ in range(3):
        run.beat(first, slow, again, supervision)
    assert isinstance(let_in := joined(), Message), let_in
    assert let_in.fields["admitted"] == [1]


def test_what_a_member_gives_before_it_is_registered_is_kept_until_that_says_whether_it_must_be() -> None:
    for restarts, kept in ((True, {"specification": False}), (False, {})):
        worker = Participant(Address("here", "worker", 0, timeout=10.0), 7, {})
        worker.start(0.0)
        worker.on_call(0.0, Call(1, "put", {"name": "specification"}))
        worker.on_message(0.0, Peer("coordinator", 0), Message("done", {}, request=2))
        assert worker.memory.report(0, 0, {})[0]["values"] == {"specification": False}
        registered = {"view": View(1, (), ()).as_dict(), "keep": restarts}
        worker.on_message(0.0, Peer("coordinator", 0), Message("done", registered, request=1))
        assert worker.memory.report(0, 0, {})[0]["values"] == kept


def test_without_restarts_nothing_is_kept_for_them() -> None:
    run = Run(1)
    run.coordinator = Coordinator(CoordinatorSettings("here", 1, 0))
    run.coordinator.start(0.0)
    worker = run.worker(0)
    run.collect(worker)
    role = run.roles[worker]
    assert isinstance(role, Participant)
    assert role.memory.report(0, 0, {})[0]["rounds"] == []
    assert run.call(worker, "leave")() is not None


def test_a_server_that_training_has_waited_for_is_as_old_as_the_others_and_one_that_comes_again_is_not() -> None:
    """Whoever is equally old has its share of the slices: none of them had state when training began."""
    coordinator = Coordinator(CoordinatorSettings("here", 1, 2, supervised=True, supervisor=5, survivable=1))
    views: list[View] = []

    def hear(sender: Peer, kind: str, **fields: Any) -> None:
        said = Message(kind, {"session": 0, "floor": 0, **fields}, (), 1)
        for effect in coordinator.on_message(1.0, sender, said):
            if isinstance(effect, Send) and effect.message.kind == "view":
                views.append(View.from_dict(effect.message.fields["view"]))

    about = {"process": 1, "host": "here", "endpoint": "there", "public_key": ""}
    worker = Peer("worker", 0, 0, 1)
    coordinator.start(0.0)
    hear(worker, "hello", **about)
    hear(Peer("server", 0, 0, 1), "hello", **about)
    hear(worker, "collect", sequence=0, operation="start", seal=True, boundary=False)
    hear(Peer("server", 1, 0, 1), "hello", **about)
    first, late = views[-1].servers
    assert views[-1].age(first) == views[-1].age(late)
    died = {"role": "server", "id": 1, "incarnation": 0, "process": 1, "how": "was killed", "replaced": True}
    hear(Peer("supervision", 0, 0, 5), "died", **died)
    hear(Peer("server", 1, 1, 2), "hello", **about)
    first, again = views[-1].servers
    assert views[-1].age(first) < views[-1].age(again)


def test_what_one_held_that_was_lost_before_a_restart_is_given_to_another() -> None:
    run, (first, second) = trained(2)
    for peer in (first, second):
        run.call(peer, "epoch", epoch=0, samples=4, chunk=1)
    run.call(second, "take", epoch=0, processed=0)
    for _ in range(22):
        run.beat(first)  # The other one is stopped for longer than the time-out, and missed.
    run.coordinate(1)
    for _ in range(4):
        run.beat(second, first)
    chunks = [run.call(first, "take", epoch=0, processed=done)() for done in range(4)]
    assert [chunk.fields["start"] for chunk in chunks if isinstance(chunk, Message)] == [0, 1, 2, 3]
