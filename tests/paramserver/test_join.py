"""Workers that join a run and leave it, as the coordinator sees them."""

from array import array

import pytest

from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.memory import Taken
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.coordinator.window import PLACE, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.server.clocks import StaleClock

pytestmark = pytest.mark.light
HELLO = {"process": 4711, "host": "node1", "endpoint": "", "public_key": ""}
BEAT = {"here": 99, "seen": 99, "notices": 0}
SERVER, ZERO, ONE = Peer("server", 0), Peer("worker", 0), Peer("worker", 1)


class Run:
    """A coordinator of two workers and a server, and what they say to it."""

    def __init__(self, elastic=2, timeout=100.0, **options):
        self.coordinator = Coordinator(CoordinatorSettings("here", 2, 1, timeout, 1e9, elastic=elastic, **options))
        self.coordinator.start(100.0)
        self.now = 100.0
        self.numbers = {}
        self.sequence = 0

    def say(self, peer, kind, **fields):
        request = self.numbers[peer] = self.numbers.get(peer, 0) + 1
        message = Message(kind, {"session": 0, "floor": request, **fields}, (b"x",), request)
        return [one for one in self.coordinator.on_message(self.now, peer, message) if isinstance(one, Send)]

    def told(self, effects, peer, kind):
        return [one.message.fields for one in effects if one.to == peer and one.message.kind == kind]

    def place(self):
        (effect,) = self.coordinator.on_message(self.now, Peer(WATCHER, 0), Message(PLACE))
        return effect.message.fields

    def beats(self, *peers):
        """Everybody has the newest view."""
        return [one for peer in peers for one in self.say(peer, "beat", told=0, **BEAT)]

    def collect(self, peer, operation, sequence, **fields):
        return self.say(peer, "collect", operation=operation, sequence=sequence, **fields)

    def trains(self):
        """The two have begun an epoch of ten chunks, and have met at the first boundary."""
        for peer in (SERVER, ZERO, ONE):
            self.say(peer, "hello", **HELLO)
        for operation, fields in (("start", {"seal": True}), ("boundary", {"boundary": True})):
            for peer in (ZERO, ONE):
                self.say(peer, "epoch", epoch=0, samples=10, chunk=1)
                self.collect(peer, operation, self.sequence, **{"seal": False, "boundary": False} | fields)
            self.beats(SERVER, ZERO, ONE)
            self.sequence += 1
        for peer in (ZERO, ONE):
            self.say(peer, "take", epoch=0, processed=0, ordinal=0)

    def joins(self):
        """One more asks for a place, takes it, and waits to be let in; it is told nothing before the others know it."""
        found = self.place()
        peer = Peer("worker", found["place"], found["life"], 7)
        assert self.told(self.say(peer, "hello", **HELLO), peer, DONE)
        return peer, self.collect(peer, "start", 0, seal=True, boundary=False)


def test_places_are_given_while_there_are_some():
    run = Run(elastic=2)
    assert (run.place()["place"], run.place()["life"], run.place()["workers"]) == (2, 0, 2)
    run.say(Peer("worker", 2, 0, 7), "hello", **HELLO)
    assert run.place()["place"] == 3
    same = run.say(Peer("worker", 2, 0, 8), "hello", **HELLO)
    assert "was registered already" in same[0].message.fields["message"]
    run.say(Peer("worker", 3, 0, 7), "hello", **HELLO)
    assert "place" not in run.place()
    run.say(Peer("worker", 2, 0, 7), "leave", told=0)
    assert (run.place()["place"], run.place()["life"]) == (2, 1)
    refused = run.say(Peer("worker", 4), "hello", **HELLO)
    assert "2 places for workers that join: no worker 4 is expected" in refused[0].message.fields["message"]


def test_without_elastic_there_is_no_place():
    run = Run(elastic=0)
    assert "place" not in run.place()
    assert run.place()["elastic"] == 0
    assert run.say(Peer("worker", 2), "hello", **HELLO)[0].message.kind == "refused"


def test_nobody_waits_for_who_may_join_before_training_and_its_loss_ends_nothing():
    run = Run(timeout=1.0)
    peer, _ = run.joins()
    for one in (SERVER, ZERO, ONE):
        run.say(one, "hello", **HELLO)
    for _ in range(40):
        run.now += 0.1
        run.beats(SERVER, ZERO, ONE)
        run.coordinator.on_timer(run.now, "tick")
    assert peer not in [member.peer for member in run.coordinator.members]
    status = run.coordinator.on_message(run.now, Peer(WATCHER, 0), Message("watch"))[0].message.fields
    assert status["ended"] is None
    assert status["losses"] == 1


def test_one_is_let_in_after_a_boundary_with_what_the_others_were_told_there():
    run = Run()
    run.trains()
    peer, effects = run.joins()
    assert not run.told(effects, peer, DONE)
    assert not run.told(run.beats(SERVER, ZERO, ONE), peer, DONE)
    (told,) = run.told(run.beats(peer), peer, DONE)
    assert (told["sequence"], told["midway"], told["joined"]) == (1, 1, True)
    assert (told["ids"], told["admitted"]) == ([0, 1], [2])
    run.say(peer, "epoch", epoch=0, samples=10, chunk=1)
    (chunk,) = run.told(run.say(peer, "take", epoch=0, processed=0, ordinal=0), peer, DONE)
    assert (chunk["start"], chunk["stop"]) == (2, 3)
    # The others wait for it at the end of the epoch, until it has left.
    for one in (ZERO, ONE):
        effects = run.collect(one, "gather", 2, seal=False, boundary=False)
        assert not run.told(effects, one, DONE)
    effects = run.say(peer, "leave", told=2, epoch=0, processed=1)
    assert run.told(effects, ONE, DONE)


def test_one_is_not_let_in_when_the_others_have_met_since_the_boundary():
    run = Run()
    run.trains()
    for one in (ZERO, ONE):
        run.collect(one, "gather", 2, seal=False, boundary=False)
    peer, _ = run.joins()
    assert not run.told(run.beats(SERVER, ZERO, ONE, peer), peer, DONE)
    run.collect(ZERO, "boundary", 3, seal=False, boundary=True)
    (told,) = run.told(run.collect(ONE, "boundary", 3, seal=False, boundary=True), peer, DONE)
    assert (told["sequence"], told["admitted"]) == (3, [2])
    assert "midway" not in told
    # The next one waits until those that were let in at the boundary have begun.
    other, _ = run.joins()
    assert not run.told(run.beats(SERVER, ZERO, ONE, peer, other), other, DONE)
    run.say(ZERO, "epoch", epoch=1, samples=10, chunk=1)
    effects = [one for who in (ZERO, ONE, peer) for one in run.collect(who, "admitted", 4, seal=False, boundary=False)]
    (told,) = run.told(effects, other, DONE)
    assert (told["sequence"], told["midway"]) == (4, 3)


def test_who_hears_nothing_while_another_is_let_in_is_missed_and_holds_nobody_up_for_ever():
    run = Run(timeout=1.0)
    run.trains()
    old = {**BEAT, "here": 1, "told": 0}
    run.say(ONE, "beat", **old)
    peer, _ = run.joins()
    for one in (ZERO, ONE):
        run.collect(one, "gather", 2, seal=False, boundary=False)
    told = []
    for tick in range(60):
        run.now += 0.05
        told += run.beats(SERVER, ZERO, peer)
        if tick < 30:
            run.say(ONE, "beat", **old)
        told += [one for one in run.coordinator.on_timer(run.now, "tick") if isinstance(one, Send)]
    assert not run.told(told, ZERO, "ended")
    assert ONE not in [member.peer for member in run.coordinator.members]
    assert run.told(told, peer, DONE)


def test_one_is_not_let_in_for_chunks_that_the_others_need():
    run = Run()
    run.trains()
    for ordinal in range(1, 9):
        run.say(ZERO, "take", epoch=0, processed=0, ordinal=ordinal)
    peer, _ = run.joins()
    assert not run.told(run.beats(SERVER, ZERO, ONE, peer), peer, DONE)


def test_who_waits_to_join_is_told_of_the_end_and_the_others_of_nothing():
    run = Run()
    run.trains()
    for one in (ZERO, ONE):
        run.collect(one, "gather", 2, seal=False, boundary=False)
    peer, _ = run.joins()
    run.say(ZERO, "leave", told=3)
    effects = run.say(ONE, "leave", told=3)
    (ended,) = run.told(effects, peer, "ended")
    assert ended["clean"]
    assert run.place()["ended"]["clean"]
    assert "place" not in run.place()


def test_what_is_kept_of_who_joins_does_not_grow_with_epochs():
    run = Run(elastic=1)
    run.trains()
    for life in range(50):
        peer, _ = run.joins()
        assert peer.life == life
        run.say(peer, "leave", told=0)
    roster = run.coordinator.roster
    assert list(roster.gone) == [Peer("worker", 2, 49, 7)]
    assert roster.is_over(Peer("worker", 2, 17, 7))
    assert not run.coordinator.history.faults


def test_who_joins_gets_what_the_others_can_spare():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 3, 1)
    assert dispatcher.can_spare((0, 1), others=True)
    assert len(dispatcher.take(5, 0, 0, (0, 1), 0, 0.0)) == 1
    assert not dispatcher.can_spare((0, 1), others=True)
    assert not dispatcher.take(5, 0, 0, (0, 1), 1, 0.0)
    assert dispatcher.take(0, 0, 0, (0, 1), 0, 0.0)
    assert dispatcher.take(1, 0, 0, (0, 1), 0, 0.0)


def test_a_chunk_that_who_leaves_has_not_worked_on_is_given_to_another():
    dispatcher = Dispatcher()
    dispatcher.begin(0, 6, 1)
    taken = [dispatcher.take(5, 0, 0, (0,), ordinal, 0.0).start for ordinal in range(3)]
    dispatcher.processed(5, 0, 2)
    dispatcher.lose(5)
    rest = [dispatcher.take(0, 0, 0, (0,), ordinal, 0.0) for ordinal in range(5)]
    assert [chunk.start for chunk in rest if chunk] == [taken[2], 3, 4, 5]


def test_who_joins_stands_for_no_worker_that_is_expected():
    clock = StaleClock(1, expected=2)
    clock.join(2)
    clock.join(0)
    assert clock.expects
    clock.join(1)
    assert not clock.expects


def test_what_those_have_done_who_left_is_told_the_next_coordinator():
    before, after = Dispatcher(), Dispatcher()
    before.begin(3, 12, 2)
    for ordinal in range(3):
        before.take(5, 3, 0, (0,), ordinal, 0.0)
    before.take(0, 3, 0, (0,), 0, 0.0)
    before.processed(5, 3, 4)
    before.lose(5, joined=True)
    own = Taken(12, 2, 0, 1, array("q", (3, 6, 8)))
    after.follow({3: {0: own}}, before.done)
    rest = [after.take(0, 3, 2, (0,), ordinal, 0.0) for ordinal in range(1, 6)]
    assert [chunk.start for chunk in rest if chunk] == [4, 8, 10]
    assert after.done == before.done


def test_what_one_holds_is_given_out_again_after_a_restart_too():
    dispatcher = Dispatcher()
    dispatcher.follow({3: {0: Taken(12, 2, 0, 1, array("q", (3, 6, 8)))}})
    dispatcher.lose(0)
    assert dispatcher.take(1, 3, 0, (1,), 0, 0.0).start == 6
