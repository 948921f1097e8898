"""Supervision of one node's processes: it starts, restarts and ends them, and reports deaths to the coordinator."""

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from cnnstrategies.paramserver.coordinator.participant import Reporter
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, Address
from cnnstrategies.paramserver.core.node import Call, Message, Peer
from cnnstrategies.paramserver.core.requests import DONE
from cnnstrategies.paramserver.drivers.control import Line, Loop
from cnnstrategies.paramserver.security import KeyPair, process_number
from cnnstrategies.paramserver.services import Handle, ending
from cnnstrategies.runtime.memory_records import last_record
from cnnstrategies.runtime.processes import is_stopped

COORDINATOR = "coordinator"
POLL = 0.02  # seconds between two checks of the supervised processes
ASK_EVERY = 1.0  # seconds between two requests to the coordinator for the run's status
ANSWER_SECONDS = 0.5  # longest time, in seconds, to wait for a reply from the coordinator
GRACE = 5.0  # seconds within which a coordinator or a server may end by itself before it is killed
# Seconds within which a worker may end by itself after the time-out. The end of an interpreter that has imported torch
# takes about two seconds of CPU time, and the worker first waits for the end of the worker that has failed.
WORKER_GRACE = 10.0


@dataclass
class Watched:
    """A process under supervision.

    Attributes:
        role: ``worker``, ``server`` or ``coordinator``.
        id: Id among the processes of the same role.
        start: Function that starts the process. Its argument is the incarnation.
        restarts: Number of restarts that are left.
        incarnation: Incarnation of the process: the number of earlier processes with this role and id.
        handle: The running process.
        code: Exit code of a process that has ended and will not be replaced; None until then.
        stopped: Seconds for which the process has been stopped, for example by SIGSTOP.
        reason: Reason why the supervision process has killed this process; empty if this process was not killed.
        ended: Time at which the process ended by itself while the coordinator could not be reached; otherwise None.
    """

    role: str
    id: int
    start: Callable[[int], Handle]
    restarts: int = 0
    incarnation: int = 0
    handle: Handle = field(init=False)
    code: int | None = None
    stopped: float = 0.0
    reason: str = ""
    ended: float | None = None

    def __str__(self) -> str:
        number = "" if self.role == COORDINATOR else f" {self.id}"
        return f"{self.role}{number} (process {self.handle.pid} on {os.uname().nodename})"

    @property
    def member(self) -> tuple[str, int, int]:
        """Role, id and incarnation, with which the coordinator identifies the process."""
        return self.role, self.id, self.incarnation

    def end_silent(self) -> None:
        """Kill the process because it is stopped or sends no heartbeats, and set :attr:`reason`."""
        silence = f"was stopped, as by SIGSTOP, for {self.stopped:.0f} s" if self.stopped else "sent no heartbeat"
        self.reason = self.reason or f"{silence}, and is ended"
        self.stopped = 0.0
        self.handle.send_signal(signal.SIGKILL)


class Supervision:
    """Supervision of this node's processes: start the processes, and watch them until all workers have ended.

    A process with restarts left is started again in two cases. Either a signal has killed the process. Or the process
    has ended by itself because it lost the connection to the coordinator, and the coordinator has removed it because
    of missing heartbeats. If the coordinator cannot be asked about this, the decision is postponed, for at most the
    time that a process may take to register. A process that ended with any other error ends the run, because a new
    process would fail in the same way. Each death is reported to the coordinator at once. The report also says whether
    the process is replaced.

    The coordinator and the servers end by themselves when all workers have left the session. If the workers begin
    another session, the workers themselves start the new coordinator and the new servers. After that, no worker is
    started again.

    The supervision process has no open sockets and no threads while it starts processes, so it can use fork.

    Args:
        coordinator: Address of the coordinator.
        keys: The run's CURVE keys; None without encryption.

    Attributes:
        watched: The supervised processes.
        deaths: Descriptions of the processes that did not end as planned.
        stop_seconds: Longest time in seconds that the workers may take to stop after a signal. A worker limits this
            time itself, so the supervision process kills only workers that have not ended later.
        stop_signal: The first signal that the supervision process has sent to the workers to stop the run; None before.
    """

    def __init__(self, coordinator: Address, keys: KeyPair | None = None) -> None:
        self.coordinator = coordinator
        self.keys = keys
        self.watched: list[Watched] = []
        self.deaths: list[str] = []
        self.stop_seconds = 0.0
        self.stop_signal: int | None = None
        self._asked_at = self._heard_at = self._looked_at = time.monotonic()
        self._end_by: float | None = None  # Time after which workers are killed; None while the run continues.
        self._over = False  # whether the coordinator has reported that its session is over
        # Role, id and incarnation of the members that the coordinator has removed because it received no heartbeats.
        self._missed: set[tuple[str, int, int]] = set()
        self._stopping = False
        self._own_keys = None if keys is None else KeyPair.create()
        self._peer = Peer(coordinator.role, coordinator.id, 0, process_number(self._own_keys))
        self._reporter = Reporter(coordinator.session)
        self._numbers = itertools.count(1)

    def start(self, watched: Watched) -> None:
        """Start a process, and supervise it from now on."""
        watched.handle = watched.start(watched.incarnation)
        self.watched.append(watched)

    @property
    def process(self) -> int:
        """Number that identifies this supervision process to the coordinator."""
        return self._peer.process

    @property
    def workers(self) -> list[Watched]:
        """The workers among the supervised processes."""
        return [child for child in self.watched if child.role == WORKER]

    def _running(self, *roles: str) -> list[Watched]:
        return [child for child in self.watched if child.code is None and child.role in (roles or (child.role,))]

    def watch(self, tick: Callable[[], None] = lambda: None) -> None:
        """Supervise the processes until all workers have ended.

        Args:
            tick: Function that is called after each check of the processes.
        """
        while self._running(WORKER):
            self.look()
            tick()
            time.sleep(POLL)

    def look(self) -> None:
        """Check all processes once. About once a second, also ask the coordinator for its status."""
        for child in self._running():
            code = child.handle.poll()
            if code is not None:
                self._on_end(child, code)
        now = time.monotonic()
        self.end_the_stopped(now)
        if now - self._asked_at > ASK_EVERY and not (self._stopping or self._over):
            self.ask()
            self._asked_at = time.monotonic()
        if self._end_by is not None and now > self._end_by:
            for child in self._running(WORKER):
                child.reason = child.reason or "did not end by itself, and is ended"
                child.handle.send_signal(signal.SIGKILL)
            self._end_by = now + self.coordinator.timeout + WORKER_GRACE

    def send_signal(self, signum: int) -> None:
        """Send a signal to all running workers. After SIGINT, SIGTERM or SIGKILL, no process is started again."""
        if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self.stop_signal = self.stop_signal or signum
            self.expect_end(self.stop_seconds)
        for child in self._running(WORKER):
            child.handle.send_signal(signum)

    def stop(self, at_once: bool = False) -> None:
        """End the servers, the coordinator and all other running processes.

        Args:
            at_once: Whether to end the servers without waiting until the run's workers on other nodes have ended.
        """
        self._stopping = True
        for child in self._running():
            if child.reason or is_stopped(child.handle.pid):
                child.end_silent()  # A stopped process cannot end by itself, so it is killed.
                self.deaths.append(f"{child} {child.reason}")
                print(self.deaths[-1], file=sys.stderr, flush=True)
        heard = time.monotonic()
        while not (at_once or self._over or self._end_by is not None):
            if self.ask():
                heard = time.monotonic()
            # If no live coordinator is on this node, give up at once. A live coordinator that does not reply may be
            # busy, so ask again until the time-out.
            elif not self._coordinator_lives() or time.monotonic() - heard > self.coordinator.timeout:
                break
            time.sleep(POLL)
        coordinates = bool(self._running(COORDINATOR))
        if coordinates:
            self.send("end", {"message": "the run is over", "clean": True})
        self._end(SERVER, GRACE)
        if coordinates:
            self.send("stop", {"members": [[child.role, child.id] for child in self.watched]})
        self._end(COORDINATOR, GRACE)
        self._end(WORKER, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.stop(at_once=error is not None)

    # Ends

    def _on_end(self, child: Watched, code: int) -> None:
        if self._stopping or code == 0:
            child.code = code
            if child.role == WORKER and not self._stopping:
                self.send("left", {"role": child.role, "id": child.id, "incarnation": child.incarnation})
            return
        cut_off = self._was_cut_off(child, code)
        if cut_off is None:
            return  # The cause of the end is not known yet, so a later check decides whether to start a replacement.
        killed = code < 0 or cut_off
        if code < 0 and child.role == WORKER and not self._over:
            self.ask()
        # Once a worker has finished, the other workers do not admit new workers, so a killed worker is not replaced.
        finished = any(worker.code == 0 for worker in self.workers)
        over = (child.role == WORKER and (self._over or finished)) or (child.role == COORDINATOR and self._over)
        replaced = killed and child.restarts > 0 and self._end_by is None and not over
        how = child.reason or ending(code)
        death = f"{child} {how}"
        if killed or child.role != WORKER:
            self.deaths.append(death)
        if killed:  # Otherwise the process has printed the reason itself before it ended.
            consequence = "it is started again" if replaced else "it is not replaced"
            if child.restarts and self._over:
                consequence += ": restarts are possible only in the first session of a run"
            # The record is printed here and not reported to the coordinator, because each rank prints that report.
            killed_by_system = code == -signal.SIGKILL and not child.reason
            record = last_record(child.handle.pid) if killed_by_system else ""
            print("; ".join(filter(None, (death, consequence, record))), file=sys.stderr, flush=True)
        if child.role == COORDINATOR:
            if not (replaced or self._over):  # If the coordinator is replaced, the run continues from the journal.
                self.expect_end()
        elif self._over:
            if child is self.workers[0]:
                # After the first session, the first worker starts the coordinator and the servers of each session, so
                # these processes and the run end with this worker.
                self.expect_end()
        elif killed:
            fields = {"role": child.role, "id": child.id, "incarnation": child.incarnation, "process": child.handle.pid}
            self.send("died", {**fields, "how": how, "replaced": replaced})
        elif code < 128:
            # Exit codes of 128 and above are not reported as errors: the user has stopped the run with a signal, whose
            # number is `code - 128`.
            self.send("end", {"message": death, "clean": False})
        if replaced:
            child.restarts -= 1
            child.incarnation += 1
            child.ended, child.reason = None, ""
            child.handle = child.start(child.incarnation)
            return
        child.code = code
        if child.role == WORKER and not killed:
            self.expect_end()

    def _was_cut_off(self, child: Watched, code: int) -> bool | None:
        """Return whether a process ended by itself because it had lost the connection to the coordinator.

        This is the case if the coordinator had removed the process because of missing heartbeats. If the coordinator
        cannot be reached now, return None, so that a later call decides.
        """
        if not 0 < code < 128 or child.role == COORDINATOR or self._over or self._end_by is not None:
            return False
        if self.ask():
            return child.member in self._missed
        now = time.monotonic()
        if child.ended is None:
            if not child.restarts or now - self._heard_at < self.coordinator.timeout / 2:
                # The coordinator replied a short time ago, so it has not died but ended: the run is over.
                return False
            child.ended = now
        return None if now - child.ended < self.coordinator.appear else False

    def expect_end(self, seconds: float = 0.0) -> None:
        """Start no process again, and kill the workers that have not ended in time.

        Args:
            seconds: Longest time in seconds that the workers may take, if this is longer than the time-out.
        """
        if self._end_by is None:
            self._end_by = time.monotonic() + max(seconds, self.coordinator.timeout) + WORKER_GRACE

    def end_the_stopped(self, now: float) -> None:
        """Kill processes that have been stopped, for example by SIGSTOP, for longer than the time-out.

        This check is needed because the coordinator watches only processes that have registered and have not left.

        Args:
            now: The time, in seconds.
        """
        # Count at most one second per check, because this process may also have been stopped, for example by Ctrl-Z.
        # A pause of this process must not count as a pause of its child processes.
        passed, self._looked_at = min(now - self._looked_at, 1.0), now
        for child in self._running():
            child.stopped = child.stopped + passed if is_stopped(child.handle.pid) else 0.0
            limit = self.coordinator.timeout
            if child.role == COORDINATOR and child.restarts:
                # Use half the time-out, so that the coordinator is restarted before the members count it as dead.
                limit /= 2
            if child.stopped > limit:
                child.end_silent()

    def _coordinator_lives(self) -> bool:
        return any(child.handle.poll() is None for child in self._running(COORDINATOR))

    def _end(self, role: str, grace: float) -> None:
        deadline = time.monotonic() + grace
        for child in self._running(role):
            while (code := child.handle.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL)
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    child.handle.send_signal(signal.SIGKILL)
            while (code := child.handle.poll()) is None:
                time.sleep(POLL)
            child.code = code

    # The coordinator

    def ask(self) -> bool:
        """Ask the coordinator whether its session has ended, and which members send no heartbeats.

        Members on this node that send no heartbeats are killed.

        Returns:
            Whether the coordinator has replied.
        """
        answer = self.send("status")
        if answer is None:
            return False
        self._heard_at = time.monotonic()
        ended = answer.fields.get("ended")
        if ended is not None and ended["clean"]:
            self._over = True
        elif ended is not None:
            self.expect_end()
        self._missed |= {
            (role, identity, incarnation) for role, identity, incarnation in answer.fields.get("silent", [])
        }
        for child in self._running():
            if child.member in self._missed and child.handle.poll() is None:
                child.end_silent()
        return True

    def send(self, kind: str, fields: Mapping[str, object] | None = None) -> Message | None:
        """Send a request to the coordinator over a new connection, and wait for the reply for `ANSWER_SECONDS`.

        Each call also repeats the earlier requests that have no reply yet. A coordinator that was too busy to reply
        thus still receives the reports of all deaths.

        Args:
            kind: Kind of the request: ``died``, ``left``, ``status``, ``end`` or ``stop``.
            fields: Fields of the request, as values that JSON can represent; None for no fields.

        Returns:
            The reply; None if the reply did not arrive in time.
        """
        number = next(self._numbers)
        answers: dict[int, Message | str] = {}
        with Line(self.coordinator, self._peer, self._own_keys, self.keys) as line:
            loop = Loop(
                self._reporter,
                lambda to, message: line.send(message),
                lambda result: answers.update({result.call: result.value}),
            )
            loop.start()
            loop.act(self._reporter.on_call(time.monotonic(), Call(number, kind, fields or {})))
            until = time.monotonic() + ANSWER_SECONDS
            while number not in answers and (remaining := until - time.monotonic()) > 0:
                loop.hear(line.receive(loop.until_next(remaining)))
        answer = answers.get(number)
        return answer if isinstance(answer, Message) and answer.kind == DONE else None
