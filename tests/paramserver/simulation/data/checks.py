"""What must hold of the members in every simulated run of workers and servers, numbered as in the design."""

from cnnstrategies.paramserver.core.node import Peer
from cnnstrategies.paramserver.specification import Specification
from simulation.data.members import Members
from simulation.data.processes import LOOK_WORKER
from simulation.data.watch import MOST_WORKERS
from simulation.faults import DEADLY
from simulation.invariants import HARD, WITHIN
from simulation.plane import ViolationError
from simulation.world import Process, World

OFTEN = 5  # messages that are lost within a time-out: as if the connection was cut
ENTRIES = MOST_WORKERS  # steps, or workers, of which a server keeps something


class Checks:
    """Watches a run."""

    def __init__(self, world: World, members: Members, specification: Specification) -> None:
        self._world = world
        self._members = members
        self._specification = specification
        self._progressed = 0.0
        members.on_begin = self._begun

    def _begun(self, worker: Peer, step: int) -> None:
        """A worker begins a step."""
        self._progressed = self._world.now
        self._members.watch.begun(step, self._world.now)
        if self._specification.mode != "ssp" or worker[:3] in self._members.gone:
            return  # One that counts as dead, maybe as replaced, is held by nobody, and ends when it hears of that.
        for other, process in self._members.workers.items():
            if not process.alive or not process.role.joined or process.ended is not None:
                continue
            at = process.role.role.step
            gone = process.peer[:3] in self._members.gone
            if not gone and step - at > self._specification.staleness:
                raise ViolationError(f"8: {worker} begins step {step}, worker {other} is at {at}")

    @property
    def over(self) -> bool:
        """Whether each of the run's own workers has come to its end, or nothing can go on."""
        own = (self._members.workers[one] for one in range(self._specification.workers))
        return self._members.over is not None or all(not one.alive or one.ended is not None for one in own)

    def look(self) -> None:
        """Raise if nothing has gone on for long; take out workers that have ended with an error."""
        for worker, process in self._members.workers.items():
            if process.ended is not None and process.ended.clean and worker not in self._members.left:
                self._members.leave(worker)
                self._progressed = self._world.now
            elif process.ended is not None and not process.ended.clean and process.alive:
                self._check_end(process)
                process.alive = False
                self._members.died_at = self._world.now  # Who takes its place may wait as long as it has.
                self._members.dead(process)
        since = max(self._progressed, self._last_fault())
        patience = WITHIN * self._specification.timeout + (self._specification.patience - self._specification.timeout)
        if self._world.now - since > patience:
            stuck = [str(one) for one in self._members.workers.values() if one.alive and one.ended is None]
            raise ViolationError(f"17: nothing has happened for {self._world.now - since:.1f} s: {', '.join(stuck)}")

    def _last_fault(self) -> float:
        timed = [fault.at + fault.seconds * (fault.kind not in DEADLY) for fault in self._world.faults.timed]
        return max([*timed, self._members.died_at])

    def _victims(self) -> set[str]:
        """Who was hit so hard that a run may have to go on without it."""
        hit: dict[str, float] = {}
        for fault in self._world.faults.timed:
            name = f"{fault.role} {fault.id}"
            seconds = 2 * self._specification.timeout if fault.kind in DEADLY else fault.seconds
            if fault.kind != "sleep" and fault.at <= self._world.now:
                hit[name] = hit.get(name, 0.0) + seconds
        return {name for name, seconds in hit.items() if seconds > HARD * self._specification.timeout}

    def _check_end(self, process: Process) -> None:
        assert process.ended is not None
        reason, name = process.ended.reason, str(process.peer)
        victims = self._victims() | self._members.died
        if name.partition(" (")[0] in victims or self._was_cut_off(name.partition(" (")[0], reason):
            return
        if not any(victim in reason for victim in victims):
            raise ViolationError(f"17: {name} ends naming no cause: {reason}; victims: {sorted(victims)}")
        servers = [victim for victim in victims if victim.startswith("server")]
        if len(servers) < self._specification.replication and not self._was_silent(reason):
            raise ViolationError(f"17: {name} ends without need: {reason}; victims: {sorted(victims)}")

    def _was_cut_off(self, worker: str, reason: str) -> bool:
        """Whether the connection that a worker names, of its own or of two servers, broke again and again.

        Also just as the silence began: the worker, which looks at the time now and then, gives up a little later.
        """
        now = self._world.now - LOOK_WORKER
        for (one, other), times in self._members.broken.items():
            silent = other == worker and f"had no answer from {one}" in reason
            deaf = any(f"{a} has heard nothing from {b}" in reason for a, b in ((one, other), (other, one)))
            since = now - (self._specification.deaf_after if deaf else self._specification.patience)
            if (silent or deaf) and sum(at > since for at in times) >= OFTEN:
                return True
        return False

    def _was_silent(self, reason: str) -> bool:
        """Whether a server was not heard for long because what it had sent was lost before it was hit."""
        since = self._world.now - self._specification.patience
        return any(
            f"had no answer from {fault.role} {fault.id}" in reason and since < fault.at <= self._world.now
            for fault in self._world.faults.timed
        )

    def check(self) -> None:
        """Raise if something is not as it should be at the end."""
        for identity, process in self._members.servers.items():
            entries = process.role.server.mode.entries
            if entries > ENTRIES:
                raise ViolationError(f"14: server {identity} keeps {entries} entries")
