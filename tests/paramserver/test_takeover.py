"""A server that is silent for a little while is replaced by its copies, if these are complete."""

import pytest
from test_join import BEAT, HELLO, ZERO

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.server.replication import Replicas
from cnnstrategies.paramserver.slicing import Part, Slice
from cnnstrategies.strategies import ParameterServerStrategy

pytestmark = pytest.mark.light
SERVERS = [Peer("server", one) for one in range(3)]
TIMEOUT, TAKEOVER = 10.0, 3.0


class Run:
    """A coordinator of a worker and three servers, each of which holds what the next one has a copy of."""

    def __init__(self, takeover=TAKEOVER):
        settings = CoordinatorSettings("here", 1, 3, TIMEOUT, 1e9, survivable=1, supervised=True, takeover=takeover)
        self.coordinator = Coordinator(settings)
        self.now = 100.0
        self.coordinator.start(self.now)
        self.numbers = {}
        for peer in (*SERVERS, ZERO):
            self.say(peer, "hello", **HELLO)
        for operation, sequence in (("start", 0), ("boundary", 1)):
            fields = {"seal": operation == "start", "boundary": operation == "boundary"}
            self.say(ZERO, "collect", operation=operation, sequence=sequence, **fields)
            self.beats(*SERVERS, ZERO)

    def say(self, peer, kind, **fields):
        request = self.numbers[peer] = self.numbers.get(peer, 0) + 1
        message = Message(kind, {"session": 0, "floor": request, **fields}, (b"x",), request)
        return [one for one in self.coordinator.on_message(self.now, peer, message) if isinstance(one, Send)]

    @property
    def view(self):
        return self.coordinator.roster.number

    def beats(self, *peers, whole=None):
        whole = self.view if whole is None else whole
        for peer in peers:
            figures = {"figures": {"step": 1, "whole": whole}} if peer.role == "server" else {}
            self.say(peer, "beat", told=0, **BEAT, **figures)

    def passes(self, seconds, *peers, **fields):
        """So many go by, in which these give signs of life; who is a server then."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.beats(*peers, **fields)
            self.coordinator.on_timer(self.now, "tick")
        return [member.peer for member in self.coordinator.members if member.peer.role == "server"]


def test_a_silent_server_is_replaced_by_its_copies_before_the_time_out():
    run = Run()
    assert run.passes(TAKEOVER - 0.2, *SERVERS[:2], ZERO) == SERVERS
    assert run.passes(0.4, *SERVERS[:2], ZERO) == SERVERS[:2]
    status = run.say(Peer("supervision", 0), "status")
    assert status[-1].message.fields["silent"] == [["server", 2, 0]]
    assert status[-1].message.fields["ended"] is None


def test_without_takeover_it_is_at_the_time_out():
    run = Run(takeover=0.0)
    assert run.passes(TIMEOUT - 0.2, *SERVERS[:2], ZERO) == SERVERS
    assert run.passes(0.4, *SERVERS[:2], ZERO) == SERVERS[:2]


def test_a_silent_worker_is_missed_at_the_time_out():
    run = Run()
    run.passes(TIMEOUT - 0.2, *SERVERS)
    assert ZERO in [member.peer for member in run.coordinator.members]


@pytest.mark.parametrize("who", SERVERS)
def test_nobody_takes_over_while_a_copy_is_not_there(who):
    run = Run()
    run.beats(who, whole=0)
    others = [one for one in SERVERS[:2] if one != who]
    for _ in range(round((TAKEOVER + 1) / 0.1)):
        if who != SERVERS[2]:
            run.beats(who, whole=0)
        assert run.passes(0.1, *others, ZERO) == SERVERS


def test_nobody_takes_over_from_a_second_server_before_the_first_is_filled_again():
    run = Run()
    before = run.view
    assert run.passes(TAKEOVER + 0.2, *SERVERS[:2], ZERO) == SERVERS[:2]
    assert run.passes(TAKEOVER + 0.2, SERVERS[0], ZERO) == SERVERS[:2], "one is lost already"
    again = Peer("server", 2, 1)
    died = {"role": "server", "id": 2, "incarnation": 0, "process": 4711, "how": "was killed", "replaced": True}
    run.say(Peer("supervision", 0), "died", **died)
    run.say(again, "hello", **HELLO)
    three = [*SERVERS[:2], again]
    assert run.passes(1.0, *three, ZERO, whole=before) == three, "the others speak of the one before"
    assert run.passes(TAKEOVER + 0.2, SERVERS[0], again, ZERO, whole=before) == three
    run.beats(*three)
    assert run.passes(TAKEOVER + 0.2, SERVERS[0], again, ZERO) == [SERVERS[0], again]


def test_a_coordinator_that_was_stopped_itself_misses_nobody():
    run = Run()
    run.now += TAKEOVER + 1
    run.coordinator.on_timer(run.now, "tick")
    assert run.passes(0.3, *SERVERS, ZERO) == SERVERS


def view(number, *since):
    servers = tuple(ServerInfo(one, f"s{one}", "", came) for one, came in enumerate(since) if came)
    return View(number, servers, (), tuple(one for one, came in enumerate(since) if not came), begun=1)


def test_a_server_is_whole_when_each_copy_of_what_it_holds_was_acknowledged():
    slices = {key: Slice(key, (Part(0, 0, 4, (4,)),), (4,), 4, None, servers) for key, servers in PLACES.items()}
    replicas = Replicas(0, slices)
    assert replicas.whole == 0
    replicas.place(view(3, 1, 1, 1))
    assert replicas.whole == 0
    replicas.acknowledged(0, 1, 5)
    assert replicas.whole == 0
    replicas.acknowledged(2, 2, 5)
    assert replicas.whole == 3
    replicas.place(view(4, 1, 1, 1))
    assert replicas.whole == 4
    replicas.place(view(5, 1, 0, 1))
    assert replicas.whole == 0, "a copy is lost"
    replicas.place(view(6, 1, 6, 1))
    assert replicas.whole == 0, "the new one has nothing yet"
    replicas.acknowledged(0, 1, 7)
    assert replicas.whole == 0, "this one holds the slice whose first holder has come back"
    replicas.acknowledged(1, 1, 7)
    assert replicas.whole == 6


PLACES = {0: (0, 1), 1: (1, 0), 2: (0, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"takeover": 1.0}, "takeover=1.0: use at least three heartbeats, 1.5 s, and less than timeout=10"),
        ({"takeover": 10.0}, "takeover=10.0: use at least three heartbeats"),
        ({"replication": 1}, "takeover=3.0 with replication=1: nobody else has what a server holds; use 2"),
        ({"max_restarts": 0}, "takeover=3.0 with max_restarts=0: one that was slow would be gone; use 1"),
    ],
)
def test_takeover_needs_copies_and_restarts(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ParameterServerStrategy(**{"servers": 2, "replication": 2, "max_restarts": 1, "takeover": 3.0, **options})
