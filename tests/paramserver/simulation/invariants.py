"""What must hold in every simulated run of the coordinator, with the numbers of the design's list."""

from itertools import pairwise

from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.coordinator.status import WATCH, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from cnnstrategies.paramserver.core.view import ServerInfo, View
from simulation.faults import DEADLY
from simulation.plane import ViolationError
from simulation.toys import MARKS, SAMPLES, Toys, contents
from simulation.world import Process, World

WITHIN = 6  # times the time-out: until a run that met a fault goes on or ends
HARD = 0.55  # times the time-out: a fault, or a silence, that a run may have to go on without its victim
ENTRIES = 16  # that the coordinator keeps of each member's requests


class Invariants:
    """Watches a world."""

    def __init__(self, world: World, toys: Toys, settings: CoordinatorSettings) -> None:
        self._world = world
        self._toys = toys
        self._settings = settings
        self._views: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}
        self._since: dict[str, int] = {}
        self._begun: set[tuple[int, int]] = set()
        self._members: dict[int, dict[int, int]] = {}
        self._counted = 0  # collectives that were complete
        self._known: dict[Peer, tuple[int, int]] = {}
        self._deaths: list[Process] = []
        self._last: float | None = None  # since when all that the last sender had sent to its receiver was lost
        self._silent: dict[tuple[Peer, Peer], float] = {}  # the same of all, while it is so
        self._unlucky: dict[str, float] = {}  # seconds for which members were as good as cut off, by chance
        self._sealed_at: float | None = None
        self._servers: dict[int, int] = {}  # of the newest view, and since which one
        world.on_send = self._sent
        world.on_step = self._stepped
        world.on_death = self._died
        world.on_lost = self._lose

    # While it runs

    def _died(self, process: Process) -> None:
        """Those that have come to their end are killed with the run, and lose nothing."""
        if not process.ended.clean if process.ended is not None else not process.done:
            self._deaths.append(process)

    def _lose(self, sender: Peer, receiver: Peer, cut: bool) -> None:
        """A message that was just sent is lost: by chance, if nobody is cut off."""
        since = self._silent[sender, receiver] = self._world.now if self._last is None else self._last
        if not cut:
            member = receiver if sender.role == "coordinator" else sender
            name = _name(member.role, member.id)
            self._unlucky[name] = max(self._unlucky.get(name, 0.0), self._world.now - since)

    def _sent(self, sender: Process, send: Send) -> None:
        self._last = self._silent.pop((sender.peer, send.to), None)
        if sender.peer.role != "coordinator" or "view" not in send.message.fields:
            return
        description = send.message.fields["view"]
        if isinstance(description, int):
            begins = send.message.fields["sequence"], description  # Some are let in later than the others.
            if begins not in self._begun:
                self._begun.add(begins)
                self._check_servers(description)
            return
        view, text = View.from_dict(description), str(description)
        for worker in () if view.number in self._views else view.workers:
            if worker.incarnation < self._incarnations.get(worker.id, 0):
                raise ViolationError(f"11: worker {worker.id} is again at life {worker.incarnation} in {text}")
            self._incarnations[worker.id] = worker.incarnation
        if self._views.setdefault(view.number, text) != text:
            raise ViolationError(f"11: view {view.number} is {text}, and was {self._views[view.number]}")
        for server in filter(self._knows_itself, view.servers):
            if self._since.setdefault(server.endpoint, server.since) != server.since:
                raise ViolationError(f"11: server {server.id}, which goes on, is a new one in {text}")
        if view.workers and self._sealed_at is None:
            self._sealed_at = self._world.now
        servers = {server.id: server.since for server in view.servers}
        if servers != self._servers:
            self._servers = servers

    def _knows_itself(self, server: ServerInfo) -> bool:
        """Whether a server goes on that has been told of a view with itself."""
        role = self._world.processes[SERVER, server.id].role
        view = role.view if isinstance(role, Participant) else None
        return view is not None and any(one.endpoint == server.endpoint for one in view.servers)

    def _check_servers(self, view: int) -> None:
        """A collective that lets somebody in ends when every server knows whom."""
        for member in self._toys.coordinator.roster.members:
            process = self._world.processes[member.peer.role, member.peer.id]
            if member.peer.role == SERVER and process.peer == member.peer and isinstance(process.role, Participant):
                seen = process.role.seen
                if seen < view:
                    raise ViolationError(f"10: {process} has seen view {seen}, and workers begin with {view}")

    def _stepped(self, process: Process) -> None:
        if process.peer.role == "coordinator":
            coordinator = self._toys.coordinator
            if self._counted < coordinator.rounds.sequence:
                members = {
                    one.peer.id: one.peer.incarnation for one in coordinator.roster.members if one.peer.role == WORKER
                }
                for sequence in range(self._counted, coordinator.rounds.sequence):
                    self._members[sequence] = members
            self._counted = coordinator.rounds.sequence
            return
        if process.peer.role not in (SERVER, WORKER):
            return
        view = getattr(process.role, "view", None)
        number = -1 if view is None else view.number
        known, begun = self._known.get(process.peer, (-1, 0))
        if number < known:
            raise ViolationError(f"11: {process} goes back to view {number}")
        if view is not None and begun not in (0, view.begun):
            raise ViolationError(f"11: training begins for {process} with view {begun} and with {view.begun}")
        self._known[process.peer] = number, 0 if view is None else view.begun

    def look(self) -> None:
        """Raise if nothing has gone on for long; to be called now and then."""
        since = max(self._world.progress, self._last_fault())
        if self._world.now - since > WITHIN * self._settings.timeout and self._unfinished():
            names = ", ".join(map(str, self._unfinished()))
            raise ViolationError(f"17: nothing has happened for {self._world.now - since:.2f} s: {names}")
        self._watch()

    def _watch(self) -> None:
        """Whoever watches is answered at any time, also by a coordinator that was just started again."""
        for member in self._answer().fields["members"]:
            if member["figures"].get("step", member["incarnation"]) != member["incarnation"]:
                raise ViolationError(f"18: {member['role']} {member['id']} is shown with the figures of another life")

    def _answer(self) -> Message:
        (answer,) = self._toys.coordinator.on_message(self._world.now, Peer(WATCHER, 0), Message(WATCH))
        assert isinstance(answer, Send)
        return answer.message

    @property
    def over(self) -> bool:
        """Whether every process has come to its end."""
        for one in self._world.processes.values():  # Asked after each event: a generator would cost a tenth of it.
            if one.alive and not one.done and one.ended is None and one.peer.role != "coordinator":
                return False
        return True

    def _last_fault(self) -> float:
        return max(
            (fault.at + fault.seconds * (fault.kind not in DEADLY) for fault in self._world.faults.timed), default=0
        )

    def _unfinished(self) -> list[Process]:
        return [
            one
            for one in self._world.processes.values()
            if one.peer.role in (SERVER, WORKER) and one.alive and not one.done and one.ended is None
        ]

    # At the end

    def check(self) -> None:
        """Raise if something did not go as it should."""
        self._check_results()
        self._check_ends()
        self._check_samples()
        entries = self._toys.coordinator.answering.entries
        members = self._settings.workers + self._settings.servers + self._settings.max_joiners
        if entries > ENTRIES * members:
            raise ViolationError(f"14: the coordinator keeps {entries} entries for {members} members")

    def _check_results(self) -> None:
        for sequence, told in self._toys.log.results.items():
            for worker, (_, mark, _) in contents(next(iter(told.values()))).items():
                incarnation = self._members[sequence].get(worker)
                if incarnation is None or incarnation % MARKS != mark:
                    raise ViolationError(
                        f"10: collective {sequence} has life {mark} of worker {worker}, no member then"
                    )
            answers = {str((one.fields["ids"], contents(one))) for one in told.values()}
            if len(answers) > 1:
                raise ViolationError(f"12: collective {sequence} has the results {answers}")
            for peer, one in told.items():
                mine = contents(one).get(peer.id)
                if mine is None and not one.flag("joined"):
                    raise ViolationError(f"12: {peer} is not in the result of its collective {sequence}")

    def _check_ends(self) -> None:
        victims = self._victims() | self._unheard()
        over = self._world.processes["coordinator", 0].ended is not None
        own = [self._world.processes[WORKER, one] for one in range(self._settings.workers)]
        told = {one.ended.reason for one in own if one.ended is not None}
        for process in self._world.processes.values():
            ended = process.ended
            if not process.alive or ended is None or ended.clean or process.peer.role == "coordinator":
                continue
            if self._joins(process.peer) and (ended.reason in told or over):
                continue  # It was told what all were told, or has knocked at a run that is over.
            # One that is cut off knows only whom it does not hear.
            named = {*victims, "the coordinator"} if str(process.peer) in victims else victims
            named = {*named, "was silent"} if "coordinator" in victims else named
            named = {*named, "did not appear"} if self._could_not_be_reached() else named
            if not any(victim in ended.reason for victim in named):
                raise ViolationError(f"17: {process} ends naming no cause: {ended.reason}; victims: {victims}")
            if not self._is_needed(process, victims):
                raise ViolationError(f"17: {process} ends without need: {ended.reason}; victims: {victims}")

    def _unheard(self) -> set[str]:
        """Who has ended since a coordinator was killed again before it could tell all that it is there."""
        kills = sorted(fault.at for fault in self._world.faults.timed if fault[:2] == ("kill", "coordinator"))
        if all(after - before > self._settings.timeout for before, after in pairwise(kills)):
            return set()
        ends = ((process.peer, process.ended) for process in self._world.processes.values())
        return {str(peer) for peer, ended in ends if ended is not None and "was silent" in ended.reason}

    def _is_needed(self, process: Process, victims: set[str]) -> bool:
        """Whether the victims make a run end, or this process. Who joins is not missed."""
        settings = self._settings
        if self._coordinator_is_lost() or str(process.peer) in victims or "worker 0" in victims:
            return True
        victims = victims - {f"{WORKER} {settings.workers + one}" for one in range(settings.max_joiners)}
        if any(victim.startswith(WORKER) and self._struck_before_training(victim) for victim in victims):
            return True
        if any(self._never_came(victim, process) for victim in victims):
            return True
        if victims | {str(one) for one in self._toys.log.left} >= {
            f"{WORKER} {one}" for one in range(settings.workers)
        }:
            return True
        return sum(victim.startswith(SERVER) for victim in victims) > settings.survivable

    def _coordinator_is_lost(self) -> bool:
        """Whether it was hit in another way than by deaths after each of which it is started again."""
        kills = sum(one.peer.role == "coordinator" for one in self._deaths)
        others = [
            fault
            for fault in self._world.faults.timed
            if (fault.role, fault.id) in (("coordinator", 0), ("supervision", 0))
            and fault.kind not in ("kill", "sleep")
        ]
        return kills > self._toys.plan.restarts or bool(others)

    def _struck_before_training(self, victim: str) -> bool:
        sealed = self._sealed_at
        return sealed is None or any(
            fault.at < sealed and (fault.kind == "crash" or _name(fault.role, fault.id) == victim)
            for fault in self._world.faults.timed
        )

    def _never_came(self, victim: str, process: Process) -> bool:
        """Whether a member was cut off from the start for as long as it had to appear, or died with its supervision."""
        assert process.ended is not None
        nodes = [node for place, node in self._toys.hosts.items() if _name(*place) == victim]
        return f"{victim} did not appear" in process.ended.reason and any(
            fault.id in nodes if fault.kind == "crash" else _name(*fault[1:3]) == victim and fault.seconds > self._long
            for fault in self._world.faults.timed
        )

    @property
    def _long(self) -> float:
        """Seconds for which one who is cut off from the start cannot register."""
        return self._settings.appear - self._settings.timeout / 2

    def _could_not_be_reached(self) -> bool:
        """Whether the coordinator was cut off for as long as the others had to appear."""
        return any(fault.role == "coordinator" and fault.seconds > self._long for fault in self._world.faults.timed)

    def _joins(self, peer: Peer) -> bool:
        """Whether a process is none of the run's own workers."""
        return peer.role == WORKER and peer.id >= self._settings.workers

    def _victims(self) -> set[str]:
        """Who was hit so hard that a run may have to go on without it."""
        timeout = self._settings.timeout
        hit = dict(self._unlucky)
        for fault in self._world.faults.timed:
            deadly = fault.kind in DEADLY
            names = [_name(fault.role, fault.id)] if fault.kind != "sleep" else []
            if fault.kind == "crash":
                names += [_name(*place) for place, node in self._toys.hosts.items() if node == fault.id]
            for name in names:
                hit[name] = hit.get(name, 0.0) + (timeout if deadly else fault.seconds)
        if "coordinator" in hit:  # Who does not hear it for that long may have heard nothing before, by chance.
            hit["coordinator"] += max(self._unlucky.values(), default=0.0)
        return {name for name, seconds in hit.items() if seconds > HARD * timeout}

    def _check_samples(self) -> None:
        log = self._toys.log
        done = [(epoch, sample) for epoch, sample, _ in log.processed]
        killed = {f"{WORKER} {one.peer.id}" for one in self._deaths if one.peer.role == WORKER}
        hit = killed | {victim for victim in self._victims() if victim.startswith(WORKER)}
        # One that ends by itself, since it hears no coordinator, tells nobody what it has done.
        ends = ((str(one.peer), one.ended) for one in self._world.processes.values() if one.peer.role == WORKER)
        hit |= {name for name, ended in ends if ended is not None and not ended.clean}
        for peer in log.idle:
            raise ViolationError(f"13: {peer} was let in after a boundary, and got nothing to do")
        gone = log.joined - log.helped
        of_gone = {(epoch, sample) for epoch, sample, peer in log.processed if peer in gone}
        again = sorted(one for one in set(done) - of_gone if done.count(one) > 1)
        if again and not hit:
            raise ViolationError(f"13: processed twice: {again}")
        # What a worker that dies has taken of an epoch is given out in that or the next, maybe to one that dies then.
        lost = len(hit) + len(gone)
        complete = range(self._toys.plan.epochs - lost) if log.left else range(0)
        missing = {(epoch, sample) for epoch in complete for sample in range(SAMPLES)} - set(done)
        if missing:
            raise ViolationError(f"13: never processed: {sorted(missing)}")


def _name(role: str, identity: int) -> str:
    return role if role == "coordinator" else f"{role} {identity}"
