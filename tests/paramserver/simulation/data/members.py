"""Workers, servers and their membership, for simulations without the coordinator and the supervisions.

The coordinator's own simulation shows that all members receive all views. Here views never get lost, but they arrive
late, and at a different time at each process.
"""

from collections.abc import Callable
from typing import Any

from cnnstrategies.paramserver.core.node import Call, Peer, Send
from cnnstrategies.paramserver.core.view import ServerInfo, View, WorkerInfo
from cnnstrategies.paramserver.messages import Kind
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.simulation.data.processes import SimulatedServer, SimulatedWorker, Wires
from tests.paramserver.simulation.data.watch import Watch, WatchedStore
from tests.paramserver.simulation.faults import DEADLY, Fault, draw, mixed
from tests.paramserver.simulation.world import Process, World

STEPS = 14
LAG = 0.4  # Seconds after which all processes have received a view.
# Draw of whether a worker joins a run. It is chosen so that the seeds that have found faults before keep their runs.
JOINED = 125


class Members:
    """The processes of a run, by role and id. A new incarnation of a process replaces the one before it.

    Attributes:
        died: Names of the processes that have died or count as dead.
        died_at: Time of the last death that is not due to a fault of the schedule.
        gone: Role, id and incarnation of each process that has died or counts as dead.
        over: The reason why the run cannot go on; None while it can.
        broken: By the names of two processes, in alphabetical order: times at which messages between the two were lost
            by chance.
    """

    def __init__(
        self, seed: int, world: World, specification: Specification, restarts: int, busy: float, away: bool
    ) -> None:
        self.servers: dict[int, Process] = {}
        self.workers: dict[int, Process] = {}
        self.watch = Watch(specification)
        self.on_begin: Callable[[Peer, int], None] = lambda worker, step: None
        self.left: set[int] = set()
        self.died: set[str] = set()
        self.died_at = 0.0
        self.gone: set[tuple[str, int, int]] = set()
        self.over: str | None = None
        self.broken: dict[tuple[str, str], list[float]] = {}
        self._seed = seed
        self._stream = mixed(seed, 69)
        self._draws = 0
        self._world = world
        self._specification = specification
        self._restarts = restarts
        self._slices = cut(specification)
        self._wires = Wires()
        self._view = View(0, (), ())
        self._back = 0.0
        self._lost: set[int] = set()
        self._answers_left = int(60 * draw(seed, 70)) if draw(seed, 71) < 0.3 else -1
        world.on_send = self._sent
        world.on_death = self.dead
        world.on_lost = self._break
        world.on_fault = self._miss
        for fault in world.faults.timed:
            self._miss(fault)
        if away:
            # Not before all servers have received the first view: real workers do not contact servers earlier.
            world.at(max(LAG, self._seconds(0.0, busy)), self._lose_coordinator)
        if specification.mode in ("async", "ssp") and draw(seed, JOINED) < 0.3:
            world.at(busy * draw(seed, 73), self._join)

    def _seconds(self, least: float, most: float) -> float:
        self._draws += 1
        return least + (most - least) * draw(self._draws, state=self._stream)

    # Processes

    def start(self) -> None:
        """Start all processes and publish the first view."""
        for server in range(self._specification.servers):
            self.servers[server] = self._serve(server, 0)
        for worker in range(self._specification.workers):
            self.workers[worker] = self._work(worker, 0)
        self._publish(
            servers=tuple(ServerInfo(number, "0", since=1) for number in self.servers),
            workers=tuple(WorkerInfo(number) for number in self.workers),
        )

    def _serve(self, identity: int, incarnation: int) -> Process:
        peer = Peer("server", identity, incarnation)
        slices = [slice_ for slice_ in self._slices if identity in slice_.servers]
        store = WatchedStore(self._specification, slices, self.watch, late=incarnation > 0)
        if incarnation:
            alone = [key for key in store.slices if self._is_alone(identity, key)]
            for key in alone:
                self.watch.reset(key, store.values[key], self._world.now)
            store.look(alone)
        else:
            store.look(store.slices)
        role = Server(self._specification, identity, store)
        simulated = SimulatedServer(role, peer, self._world, self._wires, self._seconds)
        return self._world.spawn(peer, simulated)

    def _is_alone(self, identity: int, key: int) -> bool:
        return not any(
            server != identity and self.servers[server].alive and server not in self._lost
            for server in self._slices[key].servers
        )

    def _unfilled(self, identity: int) -> None:
        """Note the slices of a lost server that its restarted backups do not hold completely: they count as lost."""
        for slice_ in self._slices:
            others = (
                [] if identity not in slice_.servers else [server for server in slice_.servers if server != identity]
            )
            left = [
                process for server in others if server not in self._lost and (process := self.servers[server]).alive
            ]
            stores = [process.role.server.store for process in left]
            if not stores or any(slice_.key in store.whole for store in stores):
                continue
            self.watch.reset(slice_.key, stores[0].values[slice_.key], self._world.now)

    def _work(self, identity: int, incarnation: int) -> Process:
        steps = STEPS // 2 if draw(self._seed, 72, identity) < 0.2 else STEPS  # Some leave early.
        simulated = SimulatedWorker(
            self._specification, self._slices, Peer("worker", identity, incarnation), steps, self._world, self._wires,
            self.watch, self._seconds, lambda worker, step: self.on_begin(worker, step),
        )  # fmt: skip
        return self._world.spawn(Peer("worker", identity, incarnation), simulated)

    def _join(self) -> None:
        """Start a worker with a new id, once all workers have begun to train."""
        workers = [self.workers[role] for role in range(self._specification.workers)]
        roles = [process.role for process in workers if process.alive and process.ended is None]
        if self.over is not None or not roles:
            return
        if self._world.now < self._back or not all(role.joined for role in roles):
            self._world.at(self._world.now + 0.05, self._join)
            return
        identity = self._specification.workers
        self._world.faults.counts["join"] += 1
        self.workers[identity] = self._work(identity, 0)
        self._publish(workers=(*self._view.workers, WorkerInfo(identity)))
        if draw(self._seed, 74) < 0.4:
            until = self._world.now + draw(self._seed, 75)
            self._world.at(until, lambda: self._world.kill(self.workers[identity]))

    # Membership

    def _break(self, first_peer: Peer, second_peer: Peer, cut: bool) -> None:
        """Note that a message was lost: by chance, unless its sender or receiver is cut off."""
        if "worker" in (first_peer.role, second_peer.role):
            self._wires.cut(first_peer, second_peer)
        if not cut:
            first, second = sorted(f"{peer.role} {peer.id}" for peer in (first_peer, second_peer))
            self.broken.setdefault((first, second), []).append(self._world.now)

    def _sent(self, sender: Process, send: Send) -> None:
        """Kill a server just as it answers a pull, in some runs."""
        if self._answers_left < 0 or send.message.kind != Kind.PULLED.name:
            return
        self._answers_left -= 1
        if self._answers_left < 0:
            self._world.faults.counts["kill as it answers"] += 1
            self.died_at = self._world.now
            self.died.add(str(sender.peer))
            self._world.at(self._world.now + 0.0001, lambda: self._world.kill(sender))

    def _publish(self, **changes: Any) -> None:
        values = {"servers": self._view.servers, "workers": self._view.workers, **changes}
        lost = tuple(sorted(self._lost)) if len(self._lost) < self._specification.replication else ()
        self._view = View(self._view.number + 1, lost=lost, **values)
        self._world.note(
            f"view {self._view.number}: servers {[(member.id, member.since) for member in self._view.servers]}, "
            f"workers {[(member.id, member.incarnation) for member in self._view.workers]}"
        )
        for process in [*self.servers.values(), *self.workers.values()]:
            self._show(process, self._view)

    def _show(self, process: Process, view: View) -> None:
        late = self._seconds(0.0, 1.0) ** 4 * LAG
        self._world.at(self._world.now + late, lambda: self._tell(process, view))

    def _tell(self, process: Process, view: View) -> None:
        if self._world.now < self._back:  # The view is lost with the coordinator; the next coordinator sends it again.
            self._world.at(self._back, lambda: self._show(process, view))
        else:
            self._world.tell(process, Call(0, "view", {"view": view}))

    def _lose_coordinator(self) -> None:
        """Kill the coordinator: until the next coordinator is back, the view does not change."""
        self._world.faults.counts["kill coordinator"] += 1
        self._world.note("the coordinator is killed")
        self.died_at = self._back = self._world.now + self._seconds(0.1, 0.6)

    def _miss(self, fault: Fault) -> None:
        """Schedule the removal of a process that a fault silences for longer than the time-out."""
        timeout = self._specification.timeout
        if fault.seconds > timeout and fault.kind != "sleep" and fault.kind not in DEADLY:
            self._world.at(fault.at + timeout * self._seconds(1.0, 1.2), lambda: self._silent(fault))

    def _silent(self, fault: Fault) -> None:
        """Remove a silent process: either its supervision kills it, or it goes on because nothing can reach it."""
        process = self._at(fault.role, fault.id)
        if not process.alive or process.ended is not None:
            return
        if self._seconds(0.0, 1.0) < 0.5:
            self._world.kill(process)
        else:
            self.dead(process)

    def _at(self, role: str, identity: int) -> Process:
        return self.servers[identity] if role == "server" else self.workers[identity]

    def dead(self, process: Process) -> None:
        """Note that a process has died or counts as dead, and schedule the run's reaction."""
        role, identity, incarnation, _ = process.peer
        if (role, identity, incarnation) in self.gone:
            return
        self.gone.add((role, identity, incarnation))
        self.died.add(f"{role} {identity}")
        self.watch.died(process.peer, self._world.now)
        self._world.at(self._world.now + self._seconds(0.01, 0.3), lambda: self._without(role, identity, incarnation))

    def leave(self, worker: int) -> None:
        """Remove a worker that has finished from the view."""
        self.left.add(worker)
        self._publish(workers=tuple(member for member in self._view.workers if member.id != worker))

    def _without(self, role: str, identity: int, incarnation: int) -> None:
        """Remove a dead process from the view, and schedule its replacement if it has restarts left."""
        if self._world.now < self._back:
            self._world.at(self._back, lambda: self._without(role, identity, incarnation))
            return
        replaced = incarnation < self._restarts and self.over is None
        if role == "worker":
            self._publish(workers=tuple(member for member in self._view.workers if member.id != identity))
        else:
            self._lost.add(identity)
            self._unfilled(identity)
            if len(self._lost) < self._specification.replication:
                self._publish(servers=tuple(member for member in self._view.servers if member.id != identity))
            elif not replaced:
                self._end(f"server {identity} was lost: its parameters are lost")
        if replaced:
            self._world.at(
                self._world.now + self._seconds(0.05, 0.5), lambda: self._replace(role, identity, incarnation + 1)
            )

    def _replace(self, role: str, identity: int, incarnation: int) -> None:
        if self._world.now < self._back:
            self._world.at(self._back, lambda: self._replace(role, identity, incarnation))
            return
        if self.over is not None:
            return
        if role == "worker":
            if identity in self.left:
                return
            others = tuple(member for member in self._view.workers if member.id != identity)
            self.workers[identity] = self._work(identity, incarnation)
            self._publish(workers=(*others, WorkerInfo(identity, incarnation)))
        else:
            self.servers[identity] = self._serve(identity, incarnation)
            self._lost.discard(identity)
            rest = tuple(member for member in self._view.servers if member.id != identity)
            self._publish(servers=(*rest, ServerInfo(identity, str(incarnation), since=self._view.number + 1)))

    def _end(self, reason: str) -> None:
        """Note why the run cannot go on."""
        self.over = self.over or reason
