"""Invariants of the members in every simulated run of workers and servers, numbered as in :mod:`.rules`."""

from cnnstrategies.paramserver.core.node import Peer
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.simulation.data.members import Members
from tests.paramserver.simulation.data.processes import LOOK_WORKER
from tests.paramserver.simulation.data.watch import MOST_WORKERS
from tests.paramserver.simulation.faults import DEADLY
from tests.paramserver.simulation.invariants import HARD, WITHIN
from tests.paramserver.simulation.plane import ViolationError
from tests.paramserver.simulation.world import Process, World

OFTEN = 5  # Number of lost messages within a time-out that count as a cut connection.
ENTRIES = MOST_WORKERS  # Largest number of steps, or of workers, about which a server keeps something.


class Checks:
    """Checks that watch a run."""

    def __init__(self, world: World, members: Members, specification: Specification) -> None:
        self._world = world
        self._members = members
        self._specification = specification
        self._progressed = 0.0
        members.on_begin = self._begun

    def _begun(self, worker: Peer, step: int) -> None:
        """Note that a worker begins a step; raise if the worker is too far ahead in mode ssp."""
        self._progressed = self._world.now
        self._members.watch.begun(step, self._world.now)
        if self._specification.mode != "ssp" or worker[:3] in self._members.gone:
            return  # Staleness does not bind a worker that counts as dead. It ends when it hears of its death.
        for other, process in self._members.workers.items():
            if not process.alive or not process.role.joined or process.ended is not None:
                continue
            at = process.role.role.step
            gone = process.peer[:3] in self._members.gone
            if not gone and step - at > self._specification.staleness:
                raise ViolationError(7, f"{worker} begins step {step}, worker {other} is at {at}")

    @property
    def over(self) -> bool:
        """Whether each worker of the run, joiners excluded, has ended, or the run cannot go on."""
        workers = (self._members.workers[worker] for worker in range(self._specification.workers))
        return self._members.over is not None or all(not worker.alive or worker.ended is not None for worker in workers)

    def look(self) -> None:
        """Raise if the run has made no progress for too long; remove workers that have ended."""
        for worker, process in self._members.workers.items():
            if process.ended is not None and process.ended.clean and worker not in self._members.left:
                self._members.leave(worker)
                self._progressed = self._world.now
            elif process.ended is not None and not process.ended.clean and process.alive:
                self._check_end(process)
                process.alive = False
                self._members.died_at = self._world.now  # The worker's replacement may wait as long again.
                self._members.dead(process)
        since = max(self._progressed, self._last_fault())
        patience = WITHIN * self._specification.timeout + (self._specification.patience - self._specification.timeout)
        if self._world.now - since > patience:
            stuck = [
                str(process) for process in self._members.workers.values() if process.alive and process.ended is None
            ]
            raise ViolationError(13, f"nothing has happened for {self._world.now - since:.1f} s: {', '.join(stuck)}")

    def _last_fault(self) -> float:
        timed = [fault.at + fault.seconds * (fault.kind not in DEADLY) for fault in self._world.faults.timed]
        return max([*timed, self._members.died_at])

    def _victims(self) -> set[str]:
        """Return the names of the members that were hit so hard that the run may have to go on without them."""
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
            raise ViolationError(13, f"{name} ends without naming a cause: {reason}; victims: {sorted(victims)}")
        servers = [victim for victim in victims if victim.startswith("server")]
        if len(servers) < self._specification.replication and not self._was_silent(reason):
            raise ViolationError(13, f"{name} ends without need: {reason}; victims: {sorted(victims)}")

    def _was_cut_off(self, worker: str, reason: str) -> bool:
        """Whether the connection that a worker names broke again and again during the silence that it reports.

        The connection is the worker's own or one between two servers. Breaks shortly before the silence count as well:
        the worker looks at the time only now and then, so it gives up a little late.
        """
        now = self._world.now - LOOK_WORKER
        for (first, second), times in self._members.broken.items():
            silent = second == worker and f"had no answer from {first}" in reason
            deaf = any(f"{a} has heard nothing from {b}" in reason for a, b in ((first, second), (second, first)))
            since = now - (self._specification.deaf_after if deaf else self._specification.patience)
            if (silent or deaf) and sum(at > since for at in times) >= OFTEN:
                return True
        return False

    def _was_silent(self, reason: str) -> bool:
        """Whether a worker did not hear a server because the server was hit while the worker waited."""
        since = self._world.now - self._specification.patience
        return any(
            f"had no answer from {fault.role} {fault.id}" in reason and since < fault.at <= self._world.now
            for fault in self._world.faults.timed
        )

    def check(self) -> None:
        """Raise if an invariant does not hold at the end of the run."""
        for identity, process in self._members.servers.items():
            server = process.role.server
            if server.mode.entries > ENTRIES:
                raise ViolationError(12, f"server {identity} keeps {server.mode.entries} entries")
