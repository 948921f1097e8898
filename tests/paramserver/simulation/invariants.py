"""Invariants of every simulated run of the coordinator, with the numbers of :data:`.rules.RULES`."""

from itertools import pairwise

from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.coordinator.status import WATCH, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from cnnstrategies.paramserver.core.view import ServerInfo, View
from tests.paramserver.simulation.faults import DEADLY
from tests.paramserver.simulation.plane import ViolationError
from tests.paramserver.simulation.toys import MARKS, SAMPLES, Toys, contents
from tests.paramserver.simulation.world import Process, World

WITHIN = 6  # A run must go on or end within this multiple of the time-out after a fault.
HARD = 0.55  # A run may lose the victim of a fault or silence that is longer than this multiple of the time-out.
ENTRIES = 16  # Largest number of entries that the coordinator keeps about the requests of one member.


class Invariants:
    """Checks that watch a world."""

    def __init__(self, world: World, toys: Toys, settings: CoordinatorSettings) -> None:
        self._world = world
        self._toys = toys
        self._settings = settings
        self._views: dict[int, str] = {}
        self._incarnations: dict[int, int] = {}
        self._since: dict[str, int] = {}
        self._begun: set[tuple[int, int]] = set()
        self._members: dict[int, dict[int, int]] = {}
        self._counted = 0  # Number of complete collectives so far.
        self._known: dict[Peer, tuple[int, int]] = {}
        self._deaths: list[Process] = []
        # Time since which the last sender's messages to the last receiver were all lost.
        self._last: float | None = None
        # By sender and receiver: time since which all messages between the two were lost, while this is the case.
        self._silent: dict[tuple[Peer, Peer], float] = {}
        self._unlucky: dict[str, float] = {}  # By member: seconds for which all its messages were lost by chance.
        self._sealed_at: float | None = None
        self._servers: dict[int, int] = {}  # By server of the newest view: first view with the server's process.
        world.on_send = self._sent
        world.on_step = self._stepped
        world.on_death = self._died
        world.on_lost = self._lose

    # While it runs

    def _died(self, process: Process) -> None:
        """Note a death, unless the process had finished: killing a finished process at the end loses nothing."""
        if not process.ended.clean if process.ended is not None else not process.done:
            self._deaths.append(process)

    def _lose(self, sender: Peer, receiver: Peer, cut: bool) -> None:
        """Note that the message that was just sent is lost: by chance, unless its sender or receiver is cut off."""
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
            begins = send.message.fields["sequence"], description  # Some workers are let in later than others.
            if begins not in self._begun:
                self._begun.add(begins)
                self._check_servers(description)
            return
        view, text = View.from_dict(description), str(description)
        for worker in () if view.number in self._views else view.workers:
            if worker.incarnation < self._incarnations.get(worker.id, 0):
                raise ViolationError(9, f"worker {worker.id} is again at incarnation {worker.incarnation} in {text}")
            self._incarnations[worker.id] = worker.incarnation
        if self._views.setdefault(view.number, text) != text:
            raise ViolationError(9, f"view {view.number} is {text}, and was {self._views[view.number]}")
        for server in filter(self._has_seen_itself, view.servers):
            if self._since.setdefault(server.endpoint, server.since) != server.since:
                raise ViolationError(9, f"server {server.id} goes on, but counts as a new server in {text}")
        if view.workers and self._sealed_at is None:
            self._sealed_at = self._world.now
        servers = {server.id: server.since for server in view.servers}
        if servers != self._servers:
            self._servers = servers

    def _has_seen_itself(self, server: ServerInfo) -> bool:
        """Whether a server's process still runs and has received a view that names the server."""
        role = self._world.processes[SERVER, server.id].role
        view = role.view if isinstance(role, Participant) else None
        return view is not None and any(other.endpoint == server.endpoint for other in view.servers)

    def _check_servers(self, view: int) -> None:
        """Raise unless every server knows the view with which a collective lets workers in."""
        for member in self._toys.coordinator.roster.members:
            process = self._world.processes[member.peer.role, member.peer.id]
            if member.peer.role == SERVER and process.peer == member.peer and isinstance(process.role, Participant):
                seen = process.role.seen
                if seen < view:
                    raise ViolationError(8, f"{process} has seen view {seen}, and workers begin with {view}")

    def _stepped(self, process: Process) -> None:
        if process.peer.role == "coordinator":
            coordinator = self._toys.coordinator
            if self._counted < coordinator.rounds.sequence:
                members = {
                    member.peer.id: member.peer.incarnation
                    for member in coordinator.roster.members
                    if member.peer.role == WORKER
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
            raise ViolationError(9, f"{process} goes back to view {number}")
        if view is not None and begun not in (0, view.begun):
            raise ViolationError(9, f"training begins for {process} with view {begun} and with {view.begun}")
        self._known[process.peer] = number, 0 if view is None else view.begun

    def look(self) -> None:
        """Raise if the run has made no progress for too long. Call this now and then."""
        since = max(self._world.progress, self._last_fault())
        if self._world.now - since > WITHIN * self._settings.timeout and self._unfinished():
            names = ", ".join(map(str, self._unfinished()))
            raise ViolationError(13, f"nothing has happened for {self._world.now - since:.2f} s: {names}")
        self._watch()

    def _watch(self) -> None:
        """Check the coordinator's reply to an observer: it must come at any time, also just after a restart."""
        for member in self._answer().fields["members"]:
            if member["figures"].get("step", member["incarnation"]) != member["incarnation"]:
                raise ViolationError(
                    14, f"{member['role']} {member['id']} is shown with the figures of another incarnation"
                )

    def _answer(self) -> Message:
        (answer,) = self._toys.coordinator.on_message(self._world.now, Peer(WATCHER, 0), Message(WATCH))
        assert isinstance(answer, Send)
        return answer.message

    @property
    def over(self) -> bool:
        """Whether every process except the coordinator has finished, ended or died."""
        for process in self._world.processes.values():  # A generator would cost a tenth of the simulator's time.
            if process.alive and not process.done and process.ended is None and process.peer.role != "coordinator":
                return False
        return True

    def _last_fault(self) -> float:
        return max(
            (fault.at + fault.seconds * (fault.kind not in DEADLY) for fault in self._world.faults.timed), default=0
        )

    def _unfinished(self) -> list[Process]:
        return [
            process
            for process in self._world.processes.values()
            if process.peer.role in (SERVER, WORKER) and process.alive and not process.done and process.ended is None
        ]

    # At the end

    def check(self) -> None:
        """Raise if an invariant does not hold at the end of the run."""
        self._check_results()
        self._check_ends()
        self._check_samples()
        entries = self._toys.coordinator.answering.entries
        members = self._settings.workers + self._settings.servers + self._settings.max_joiners
        if entries > ENTRIES * members:
            raise ViolationError(12, f"the coordinator keeps {entries} entries for {members} members")

    def _check_results(self) -> None:
        for sequence, results in self._toys.log.results.items():
            for worker, (_, mark, _) in contents(next(iter(results.values()))).items():
                incarnation = self._members[sequence].get(worker)
                if incarnation is None or incarnation % MARKS != mark:
                    raise ViolationError(
                        8, f"collective {sequence} has incarnation {mark} of worker {worker}, which was not a member"
                    )
            answers = {str(contents(result)) for result in results.values()}
            if len(answers) > 1:
                raise ViolationError(10, f"collective {sequence} has the results {answers}")
            for peer, result in results.items():
                mine = contents(result).get(peer.id)
                if mine is None and not result.flag("joined"):
                    raise ViolationError(10, f"{peer} is not in the result of its collective {sequence}")

    def _check_ends(self) -> None:
        victims = self._victims() | self._ended_between_coordinators()
        over = self._world.processes["coordinator", 0].ended is not None
        workers = [self._world.processes[WORKER, worker] for worker in range(self._settings.workers)]
        reasons = {worker.ended.reason for worker in workers if worker.ended is not None}
        for process in self._world.processes.values():
            ended = process.ended
            if not process.alive or ended is None or ended.clean or process.peer.role == "coordinator":
                continue
            if self._joins(process.peer) and (ended.reason in reasons or over):
                continue  # The joiner got the same reason as the workers, or has tried to join a run that is over.
            # A process that is cut off can only name the peer that it does not hear.
            named = {*victims, "the coordinator"} if str(process.peer) in victims else victims
            named = {*named, "was silent"} if "coordinator" in victims else named
            named = {*named, "did not appear"} if self._coordinator_was_unreachable() else named
            if not any(victim in ended.reason for victim in named):
                raise ViolationError(13, f"{process} ends without naming a cause: {ended.reason}; victims: {victims}")
            if not self._is_needed(process, victims):
                raise ViolationError(13, f"{process} ends without need: {ended.reason}; victims: {victims}")

    def _ended_between_coordinators(self) -> set[str]:
        """Return the processes that ended because a coordinator was killed again before all had heard from it."""
        kills = sorted(fault.at for fault in self._world.faults.timed if fault[:2] == ("kill", "coordinator"))
        if all(after - before > self._settings.timeout for before, after in pairwise(kills)):
            return set()
        ends = ((process.peer, process.ended) for process in self._world.processes.values())
        return {str(peer) for peer, ended in ends if ended is not None and "was silent" in ended.reason}

    def _is_needed(self, process: Process, victims: set[str]) -> bool:
        """Whether the victims are a reason for the run or for this process to end. Lost joiners are not a reason."""
        settings = self._settings
        if self._coordinator_is_lost() or str(process.peer) in victims or "worker 0" in victims:
            return True
        victims = victims - {f"{WORKER} {settings.workers + worker}" for worker in range(settings.max_joiners)}
        if any(victim.startswith(WORKER) and self._struck_before_training(victim) for victim in victims):
            return True
        if any(self._never_appeared(victim, process) for victim in victims):
            return True
        if victims | {str(worker) for worker in self._toys.log.left} >= {
            f"{WORKER} {worker}" for worker in range(settings.workers)
        }:
            return True
        return sum(victim.startswith(SERVER) for victim in victims) > settings.survivable

    def _coordinator_is_lost(self) -> bool:
        """Whether the coordinator was hit by more deaths than it has restarts, or by a fault that is not a death."""
        kills = sum(process.peer.role == "coordinator" for process in self._deaths)
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

    def _never_appeared(self, victim: str, process: Process) -> bool:
        """Whether a member was cut off during all the time that it had to appear, or died with its supervision."""
        assert process.ended is not None
        nodes = [node for place, node in self._toys.hosts.items() if _name(*place) == victim]
        return f"{victim} did not appear" in process.ended.reason and any(
            fault.id in nodes
            if fault.kind == "crash"
            else _name(*fault[1:3]) == victim and fault.seconds > self._too_long
            for fault in self._world.faults.timed
        )

    @property
    def _too_long(self) -> float:
        """Shortest cut, in seconds, that keeps a process from registering if the cut begins at the start."""
        return self._settings.appear - self._settings.timeout / 2

    def _coordinator_was_unreachable(self) -> bool:
        """Whether the coordinator was cut off during all the time that the other processes had to appear."""
        return any(fault.role == "coordinator" and fault.seconds > self._too_long for fault in self._world.faults.timed)

    def _joins(self, peer: Peer) -> bool:
        """Whether a process is a joiner."""
        return peer.role == WORKER and peer.id >= self._settings.workers

    def _victims(self) -> set[str]:
        """Return the names of the members that were hit so hard that the run may have to go on without them."""
        timeout = self._settings.timeout
        hit = dict(self._unlucky)
        for fault in self._world.faults.timed:
            deadly = fault.kind in DEADLY
            names = [_name(fault.role, fault.id)] if fault.kind != "sleep" else []
            if fault.kind == "crash":
                names += [_name(*place) for place, node in self._toys.hosts.items() if node == fault.id]
            for name in names:
                hit[name] = hit.get(name, 0.0) + (timeout if deadly else fault.seconds)
        if "coordinator" in hit:  # Before the fault, a member may already have heard nothing by chance.
            hit["coordinator"] += max(self._unlucky.values(), default=0.0)
        return {name for name, seconds in hit.items() if seconds > HARD * timeout}

    def _check_samples(self) -> None:
        log = self._toys.log
        done = [(epoch, sample) for epoch, sample, _ in log.processed]
        killed = {f"{WORKER} {process.peer.id}" for process in self._deaths if process.peer.role == WORKER}
        hit = killed | {victim for victim in self._victims() if victim.startswith(WORKER)}
        # A worker that ends because it does not hear the coordinator cannot report the samples that it has processed.
        ends = (
            (str(process.peer), process.ended)
            for process in self._world.processes.values()
            if process.peer.role == WORKER
        )
        hit |= {name for name, ended in ends if ended is not None and not ended.clean}
        for peer in log.idle:
            raise ViolationError(11, f"{peer} was let in after a boundary and got nothing to do")
        gone = log.joined - log.helped
        of_gone = {(epoch, sample) for epoch, sample, peer in log.processed if peer in gone}
        again = sorted(process for process in set(done) - of_gone if done.count(process) > 1)
        if again and not hit:
            raise ViolationError(11, f"processed twice: {again}")
        # The samples of a worker that dies are given out again in this epoch or the next, possibly to another worker
        # that dies.
        lost = len(hit) + len(gone)
        complete = range(self._toys.plan.epochs - lost) if log.left else range(0)
        missing = {(epoch, sample) for epoch in complete for sample in range(SAMPLES)} - set(done)
        if missing:
            raise ViolationError(11, f"never processed: {sorted(missing)}")


def _name(role: str, identity: int) -> str:
    return role if role == "coordinator" else f"{role} {identity}"
