"""Workers, servers and supervisions that talk to the coordinator as the real processes do, but train nothing."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.contributions import unpack
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.journal import MOST_RECORDS, Journaled
from cnnstrategies.paramserver.coordinator.participant import Participant, Reporter
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, Address, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.view import View
from tests.paramserver.simulation.faults import draw
from tests.paramserver.simulation.plane import ViolationError
from tests.paramserver.simulation.sameness import differing
from tests.paramserver.simulation.world import Ask, Process, Program, Sleep, Tell, Until, World

if TYPE_CHECKING:
    from tests.paramserver.simulation.control import Plan

SAMPLES, CHUNK = 24, 2
SETUP = 2  # Number of collectives before training.
MARKS = 251  # An incarnation is sent in one byte, modulo this number.
WRITTEN = 411  # Draws of the largest number of records in a journal, and of the part of a record that is torn off.
# Runs whose workers come midway take this many times as long for a chunk: an epoch must be longer than a restart.
SLOW = 4
LOOK = 0.05  # Seconds between two looks of a supervision at its processes.


@dataclass
class Log:
    """The toys' record of a run, which the invariants check.

    Attributes:
        results: By collective: the result that each participant received.
        processed: Epoch, sample number and worker of each processed sample.
        epochs: By worker: number of finished epochs.
        left: Workers that have finished all epochs.
        joined: Joiners that were started.
        helped: Joiners that have left the run.
        idle: Workers that were let in after a boundary and got nothing to do in that epoch.
    """

    results: dict[int, dict[Peer, Message]] = field(default_factory=dict)
    processed: list[tuple[int, int, Peer]] = field(default_factory=list)
    epochs: dict[Peer, int] = field(default_factory=dict)
    left: set[Peer] = field(default_factory=set)
    joined: set[Peer] = field(default_factory=set)
    helped: set[Peer] = field(default_factory=set)
    idle: set[Peer] = field(default_factory=set)


class MemoryJournal:
    """A journal that outlives a simulated process."""

    def __init__(self) -> None:
        self._contents = bytearray()
        self._last = b""

    def read(self) -> bytes:
        """Return the whole journal."""
        return bytes(self._contents)

    def append(self, record: bytes) -> None:
        """Append a record."""
        self._contents += record
        self._last = record

    def replace(self, contents: bytes) -> None:
        """Replace the whole journal."""
        self._contents = bytearray(contents)

    def tear(self, part: float) -> None:
        """Append a part of the last record again, as if the writer were killed while it wrote."""
        self._contents += self._last[: int(part * len(self._last))]


class Toys:
    """All processes of a run.

    Attributes:
        hosts: By role and id: node of each process.
    """

    coordinator: Coordinator

    def __init__(self, world: World, settings: CoordinatorSettings, plan: "Plan", seed: int) -> None:
        self.log = Log()
        self._world = world
        self._settings = settings
        self.plan = plan
        self._seed = seed
        self._draws = 0
        self._journal = MemoryJournal()
        self.hosts: dict[tuple[str, int], int] = {("coordinator", 0): 0}
        world.on_node = lambda node: [world.processes[place] for place in self.hosts if self.hosts[place] == node]

    def start(self) -> None:
        """Start all processes."""
        self._coordinate(0)
        for role, count in ((SERVER, self._settings.servers), (WORKER, self._settings.workers)):
            for identity in range(count):
                self.hosts[role, identity] = identity % self.plan.nodes
                self.member(role, identity, 0)
        for node in range(self.plan.nodes):
            children = [place for place, host in self.hosts.items() if host == node and place[0] != "coordinator"]
            peer = Peer("supervision", node)
            self._world.spawn(peer, Reporter(self._settings.session), self._supervise(node, children))

    def _coordinate(self, incarnation: int) -> None:
        """Start the coordinator or the one that follows it. A run without restarts has no journal."""
        coordinator = Coordinator(self._settings)
        role: Coordinator | Journaled = coordinator
        if self.plan.restarts:
            if incarnation and draw(self._seed, WRITTEN, incarnation) < 0.5:
                self._journal.tear(draw(self._seed, WRITTEN, incarnation, 1))
            most = 1 + int(100 * draw(self._seed, WRITTEN, 0, 1))
            if draw(self._seed, WRITTEN) < 0.5:
                most = MOST_RECORDS
            role = Journaled(coordinator, self._journal, incarnation > 0, most)
            coordinator = role.coordinator
        if incarnation and (differs := differing(self.coordinator, coordinator)):
            raise ViolationError(16, f"the next coordinator differs from the killed coordinator: {differs}")
        self.coordinator = coordinator
        self._world.spawn(Peer("coordinator", 0, incarnation), role)

    def _seconds(self, least: float, most: float) -> float:
        self._draws += 1
        return least + (most - least) * draw(self._seed, 31, self._draws)

    def member(
        self, role: str, identity: int, incarnation: int, program: Callable[[Participant], Program] | None = None
    ) -> Process:
        """Start a worker or a server."""
        settings = self._settings
        address = Address("sim", role, identity, incarnation, settings.timeout / 10, settings.timeout, settings.appear)
        hello = {"process": 100 * identity + incarnation, "host": "sim", "endpoint": f"{role}-{identity}-{incarnation}"}
        participant = Participant(address, 1, {**hello, "public_key": ""})
        participant.figures = lambda: {"step": incarnation}
        does = program or (self._work if role == WORKER else self._serve)
        return self._world.spawn(participant.peer, participant, does(participant))

    # Programs

    def _serve(self, participant: Participant) -> Program:
        yield from newer_view(participant, -1)
        yield Ask("get", {"number": 0})
        seen = View(0, (), ())
        while True:
            seen = yield from newer_view(participant, seen.number)
            yield Sleep(self._seconds(0.0, 0.05))
            yield Tell("seen", {"number": seen.number})

    def _work(self, participant: Participant) -> Program:
        yield Sleep(self._seconds(0.0, 0.3))
        yield from newer_view(participant, -1)
        if participant.peer.id == 0:
            yield Ask("put", {"number": 0}, (b"text",))
        for _ in range(SETUP):
            yield from self.collect(participant, "gather")
        first = (yield from self._load(0)) if self.plan.eager else None
        started = yield from self.collect(participant, "start", seal=True)
        epoch = 0
        joined, midway = started.flag("joined"), MIDWAY in started.fields
        if joined:
            epoch = first_value(started)[2]
            if epoch and self.plan.eager:
                yield Ask("give_back", {"epoch": epoch})
                first = None
        if midway:
            self._world.faults.counts["return after a boundary"] += 1
        while epoch < self.plan.epochs:
            if self.plan.eager and not joined and first is None:
                first = yield from self._load(epoch)
            if not joined:
                boundary = yield from self.collect(participant, "boundary", boundary=True, epoch=epoch)
            meets = (joined and not midway) or (not joined and boundary.fields["admitted"])
            if meets and (self._settings.max_joiners or self.plan.eager):
                yield from self.collect(participant, "admitted")
            first = first or (yield from self._load(epoch))
            if midway and not len(_numbers(first)):
                self.log.idle.add(participant.peer)
            joined = midway = False
            yield from self._train(participant, epoch, first)
            first = None
            if self.plan.meets:
                yield from self.collect(participant, "gather")
            epoch += 1
            self.log.epochs[participant.peer] = epoch
        self.log.left.add(participant.peer)
        yield Ask("leave")

    def _load(self, epoch: int) -> Generator[Ask | Tell | Sleep | Until, Any, Message]:
        """Begin an epoch and return the worker's first chunk."""
        yield Ask("epoch", {"epoch": epoch, "samples": SAMPLES, "chunk": CHUNK})
        return cast(Message, (yield Ask("take", {"epoch": epoch, "processed": 0})))

    def _train(self, participant: Participant, epoch: int, chunk: Message) -> Program:
        processed = 0
        while len(_numbers(chunk)):
            yield Sleep(self._seconds(0.005, 0.08) * (SLOW if self.plan.eager else 1))
            processed += self.process(participant, chunk)
            chunk = yield Ask("take", {"epoch": epoch, "processed": processed})

    def process(self, participant: Participant, chunk: Message) -> int:
        """Process a chunk and return its number of samples."""
        numbers = _numbers(chunk)
        self.log.processed += [(chunk.integer("epoch"), number, participant.peer) for number in numbers]
        return len(numbers)

    def collect(
        self, participant: Participant, operation: str, seal: bool = False, boundary: bool = False, epoch: int = 0
    ) -> Generator[Ask | Tell | Sleep | Until, Any, Message]:
        """Take part in a collective, wait for the view that its result names, and return the result."""
        peer = participant.peer
        frames = (bytes((peer.id, peer.incarnation % MARKS, epoch)),)
        fields = {"operation": operation, "seal": seal, "boundary": boundary}
        midway = seal and self.plan.eager and peer.id < self._settings.workers
        result = yield Ask("collect", {**fields, MIDWAY: True} if midway else fields, frames)
        self.log.results.setdefault(result.fields.get(MIDWAY, result.integer("sequence")), {})[peer] = result
        yield from newer_view(participant, result.integer("view") - 1)
        return cast(Message, result)

    # Supervision

    def _supervise(self, node: int, children: list[tuple[str, int]]) -> Program:
        incarnations = dict.fromkeys(children, 0)
        over, restarts, gone = False, 0, set[tuple[str, int]]()
        asked = self._world.now
        while any(role == WORKER and self._runs(role, identity) for role, identity in incarnations):
            yield Sleep(LOOK)
            dead = not self._world.processes["coordinator", 0].alive
            if node == 0 and restarts < self.plan.restarts and not over and dead:
                restarts += 1
                yield Sleep(self._seconds(0.05, 0.3))
                self._coordinate(restarts)
            for role, identity in list(incarnations):
                process = self._world.processes[role, identity]
                left = role == WORKER and process.peer in self.log.left and process.done
                if left and (role, identity) not in gone:
                    gone.add((role, identity))
                    yield Tell("left", {"role": role, "id": identity, "incarnation": incarnations[role, identity]})
                if process.alive:
                    continue
                replaced = incarnations[role, identity] < self.plan.restarts and not over
                fields = {"role": role, "id": identity, "incarnation": incarnations[role, identity], "process": 1}
                yield Tell("died", {**fields, "how": "was killed", "replaced": replaced})
                if replaced:
                    incarnations[role, identity] += 1
                    self.member(role, identity, incarnations[role, identity])
                else:
                    del incarnations[role, identity]
            if self._world.now - asked < self._settings.timeout / 5:
                continue
            asked = self._world.now
            status = yield Ask("status", patience=self._settings.timeout / 4)
            if status is not None:
                over = over or status.fields["ended"] is not None
                for role, identity, incarnation in status.fields["silent"]:
                    if incarnations.get((role, identity)) == incarnation:
                        self._world.kill(self._world.processes[role, identity])
        if node == 0:
            yield from self._stop(children)

    def _stop(self, children: list[tuple[str, int]]) -> Program:
        until = self._world.now + self._settings.timeout
        while self._world.now < until:
            status = yield Ask("status", patience=self._settings.timeout / 4)
            if status is not None and status.fields["ended"] is not None:
                break
            until = self._world.now + self._settings.timeout if status is not None else until
        yield Ask("end", {"message": "the run is over", "clean": True}, patience=self._settings.timeout / 4)
        for place in children:
            self._world.kill(self._world.processes[place])
        yield Ask("stop", {"members": [[*place] for place in children]}, patience=self._settings.timeout / 4)

    @property
    def is_over(self) -> bool:
        """Whether all workers of the run, joiners excluded, have finished or ended."""
        return not any(self._runs(WORKER, number) for number in range(self._settings.workers))

    def _runs(self, role: str, identity: int) -> bool:
        process = self._world.processes[role, identity]
        return not process.alive or not (process.done or process.ended is not None)


def _numbers(chunk: Message) -> range:
    return range(chunk.integer("start"), chunk.integer("stop"))


def contents(result: Message) -> dict[int, bytes]:
    """Return each participant's contribution: three bytes with its id, its incarnation modulo `MARKS` and its epoch."""
    return {worker: b"".join(frames) for worker, frames in unpack(result.frames).items()}


def first_value(result: Message) -> bytes:
    """Return the contribution of the participant with the lowest id."""
    values = contents(result)
    return values[min(values)]


def newer_view(participant: Participant, number: int) -> Generator[Ask | Tell | Sleep | Until, Any, View]:
    """Wait for a view whose number is higher than `number`, and return it."""
    yield Until(lambda: participant.view is not None and participant.view.number > number)
    assert participant.view is not None
    return participant.view
