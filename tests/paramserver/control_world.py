"""The coordinator and its members in virtual time, controlled by a test message by message."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.coordinator.contributions import unpack
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.journal import Journaled
from cnnstrategies.paramserver.coordinator.participant import Participant, Reporter
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.coordinator.status import PLACE, WATCH, WATCHER
from cnnstrategies.paramserver.core.node import Call, End, Message, Peer, Role, Send
from tests.paramserver.simulation.faults import Fault, Moment, Network
from tests.paramserver.simulation.toys import MemoryJournal, newer_view
from tests.paramserver.simulation.world import Program, Sleep, Tell, World

LATENCY = 0.001
AT_ONCE = 0.01  # Seconds within which a request has a reply that does not wait for other members.
SOON = 0.1  # Seconds within which a server has seen a view.
LOST = Moment("lost")


class Links(Network):
    """A network that delivers messages at once and in order, except messages to which a test assigns a fault."""

    def __init__(self) -> None:
        super().__init__(0, 0.0, tcp=True)
        self.fate: Callable[[Send], Moment | None] = lambda send: None

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        return self.fate(send)

    def arrivals(self, now: float, link: int, ordinal: int, moment: Moment | None) -> list[float]:
        soon = now + LATENCY
        if moment is None:
            return [soon]
        late = soon + moment.seconds
        return {"lost": [], "late": [late], "doubled": [soon, late]}[moment.kind]


@dataclass
class Answer:
    """The result of a call; None as long as the call waits."""

    value: Message | str | None = None

    @property
    def fields(self) -> Any:
        assert isinstance(self.value, Message), self.value
        return self.value.fields

    @property
    def workers(self) -> list[int]:
        """Ids of the workers whose contributions the result of a collective contains."""
        assert isinstance(self.value, Message), self.value
        return list(unpack(self.value.frames))


class Run:
    """A coordinator, and the members that a test starts.

    Args:
        workers: Number of workers that the coordinator expects.
        servers: Number of servers that the coordinator expects.
        timeout: Time-out in seconds. Heartbeats are sent every tenth of it.
        settings: Other settings of the coordinator.
    """

    def __init__(self, workers: int = 2, servers: int = 0, timeout: float = 10.0, **settings: Any) -> None:
        self.settings = {"timeout": timeout, "supervised": True, **settings}
        self.counts = workers, servers
        self.links = Links()
        self.journal = MemoryJournal()
        self.world = World(0, self.links)
        self.figures: Callable[[Peer], dict[str, float]] = lambda peer: {}
        self._answers: dict[tuple[Peer, int], Answer] = {}
        self.world.on_return = lambda process, call, value: self._returned(process.peer, call, value)
        self.coordinate()
        self.supervision = self._spawn(Peer("supervision", 0), Reporter(0), _idle())

    def coordinate(self, incarnation: int = 0) -> None:
        """Start the coordinator, or replace it with its next incarnation."""
        coordinator = Coordinator(CoordinatorSettings("here", *self.counts, **self.settings))
        role = Journaled(coordinator, self.journal, follows=incarnation > 0)
        self.coordinator = role.coordinator
        self._spawn(Peer("coordinator", 0, incarnation), role, _idle())

    def member(self, role: str, identity: int, incarnation: int = 0, sees: int = 1000, run: str = "") -> Peer:
        """Start a worker or a server. A server follows its first `sees` views at once, and none of the later views."""
        timeout = self.settings["timeout"]
        address = Address("here", role, identity, incarnation, timeout / 10, timeout, 600.0)
        hello = {"process": 4711, "host": "here", "endpoint": f"{role} {identity}.{incarnation}", "public_key": ""}
        hello["run"] = run
        participant = Participant(address, 7, hello)
        participant.figures = lambda: self.figures(participant.peer)
        program = _see(participant, sees if role == "server" else 0)
        return self._spawn(participant.peer, participant, program)

    def _spawn(self, peer: Peer, role: Role, program: Program) -> Peer:
        before = self.world.processes.get(peer[:2])
        if before is not None:
            self.world.kill(before)
        self.world.spawn(peer, role, program)
        self.passes(AT_ONCE)
        return peer

    def passes(self, seconds: float) -> None:
        """Let some seconds of virtual time pass."""
        over: list[bool] = []
        self.world.at(self.world.now + seconds, lambda: over.append(True))
        while not over:
            self.world.step()

    def call(self, peer: Peer, kind: str, *frames: bytes, **fields: Any) -> Answer:
        """Let a member or the supervision send the coordinator a request."""
        answer = Answer()
        self._answers[peer, len(self._answers) + 1] = answer
        self.world.tell(self.world.processes[peer[:2]], Call(len(self._answers), kind, fields, frames))
        self.passes(AT_ONCE)
        return answer

    def collect(
        self, peer: Peer, operation: str = "gather", seal: bool = False, boundary: bool = False, **more: bool
    ) -> Answer:
        return self.call(peer, "collect", b"x", operation=operation, seal=seal, boundary=boundary, **more)

    def report_death(self, peer: Peer, replaced: bool) -> None:
        """Kill a process and let the supervision report the death."""
        self.world.kill(self.world.processes[peer[:2]])
        about = {"role": peer.role, "id": peer.id, "incarnation": peer.incarnation, "process": 4711}
        self.call(self.supervision, "died", **about, how="was killed", replaced=replaced)

    def strike(self, kind: str, peer: Peer, seconds: float) -> None:
        """Let a fault such as `pause` or `cut` hit a process for some seconds."""
        self.world.strike(Fault(kind, peer.role, peer.id, self.world.now, seconds))

    @contextmanager
    def loses(self, is_lost: Callable[[Send], bool]) -> Iterator[None]:
        """Lose the messages for which a function is true, as long as the context lasts."""
        self.links.fate = lambda send: LOST if is_lost(send) else None
        yield
        self.links.fate = lambda send: None

    def ask(self, kind: str = WATCH, sender: Peer = Peer(WATCHER, 0), **fields: Any) -> Any:  # noqa: B008
        """Return the fields of the coordinator's immediate reply to a process that is not a member."""
        effects = self.coordinator.on_message(self.world.now, sender, Message(kind, fields))
        (message,) = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == sender]
        return message.fields

    def start_joiner(self) -> tuple[Peer, Answer]:
        """Start a joiner; return it and the result of its wait to be let in."""
        offer = self.ask(PLACE)
        peer = self.member("worker", offer["place"], offer["incarnation"])
        return peer, self.collect(peer, "start", seal=True)

    def ended(self, peer: Peer) -> End | None:
        """Return the reason with which a process has ended, if it has."""
        return self.world.processes[peer[:2]].ended

    @property
    def members(self) -> list[Peer]:
        return [member.peer for member in self.coordinator.roster.members]

    def _returned(self, peer: Peer, call: int, value: Message | str | None) -> None:
        if (peer, call) in self._answers:
            self._answers[peer, call].value = value


def trained(workers: int, servers: int = 0, **settings: Any) -> tuple[Run, list[Peer]]:
    """Return a run whose workers have begun to train, and the workers."""
    run = Run(workers, servers, **settings)
    for server in range(servers):
        run.member("server", server)
    peers = [run.member("worker", worker) for worker in range(workers)]
    for peer in peers:
        run.collect(peer, "start", seal=True)
    run.passes(SOON)
    return run, peers


def in_epoch(**settings: Any) -> tuple[Run, Peer, Peer]:
    """Return a run with a server and two workers, and the two workers.

    The workers have begun an epoch of ten chunks, have met at the epoch's boundary, and have taken one chunk each.
    """
    run, (first, second) = trained(2, 1, **settings)
    for peer in (first, second):
        run.call(peer, "epoch", epoch=0, samples=10, chunk=1)
    for peer in (first, second):
        run.collect(peer, "boundary", boundary=True)
    for peer in (first, second):
        run.call(peer, "take", epoch=0, processed=0)
    return run, first, second


def _idle() -> Program:
    while True:
        yield Sleep(1e6)


def _see(participant: Participant, views: int) -> Program:
    number = -1
    for _ in range(views):
        number = (yield from newer_view(participant, number)).number
        yield Tell("seen", {"number": number})
    yield from _idle()
