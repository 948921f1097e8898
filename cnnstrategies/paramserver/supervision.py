"""Supervision of one node's processes: it restarts dead ones, informs the coordinator, and ends all of them."""

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
from cnnstrategies.runtime.processes import is_stopped

COORDINATOR = "coordinator"
POLL = 0.02  # seconds
ASK_EVERY = 1.0  # seconds
ANSWER_SECONDS = 0.5
GRACE = 5.0  # seconds


@dataclass
class Watched:
    """A process under supervision.

    Attributes:
        role: ``worker``, ``server`` or ``coordinator``.
        id: Number among the processes of its role.
        start: Function that starts the process, given its incarnation.
        restarts: How many more times the process may be started again after it was killed.
        incarnation: Number of processes that were started for this place before.
        handle: The running process.
        code: Exit code; None as long as the process runs or is started again.
        stopped: Seconds for which the process has been stopped, as by SIGSTOP.
        reason: Why the supervision has ended the process; empty if it has not.
        ended: When the process ended by itself while the coordinator could not be reached.
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
        """The process as the coordinator knows it: role, id and incarnation."""
        return self.role, self.id, self.incarnation

    def end_silent(self) -> None:
        """Kill a silent process, and keep the reason for the report on its end."""
        silence = f"was stopped, as by SIGSTOP, for {self.stopped:.0f} s" if self.stopped else "sent no heartbeat"
        self.reason = self.reason or f"{silence}, and is ended"
        self.stopped = 0.0
        self.handle.send_signal(signal.SIGKILL)


class Supervision:
    """Supervision of this node's processes: it starts them and watches them until the workers have ended.

    A process that was killed by a signal counts as faulty and is started again, as often as it may be. The same holds
    for a process that ended because it was cut off from the coordinator and the coordinator has missed it. While the
    coordinator cannot be reached, the supervision waits before it decides, for as long as a process may take to appear.
    A process that ends with another error ends the run, because it would fail again. The coordinator is told of a death
    at once, and of the decision.

    Services end by themselves when every worker has left their session. Workers that open further sessions start the
    services of these sessions themselves; from then on no worker is started again.

    The supervision holds no socket and no thread while it starts processes, so they may be forked.

    Attributes:
        watched: The processes.
        deaths: Descriptions of the processes that have not ended as planned.
    """

    def __init__(self, coordinator: Address, keys: KeyPair | None = None) -> None:
        self.coordinator = coordinator
        self.keys = keys
        self.watched: list[Watched] = []
        self.deaths: list[str] = []
        self._asked_at = self._heard_at = self._looked_at = time.monotonic()
        self._ended_at: float | None = None
        self._over = False  # whether the coordinator's session is over
        self._missed: set[tuple[str, int, int]] = set()  # members that the coordinator has missed
        self._stopping = False
        self._own_keys = None if keys is None else KeyPair.create()
        self._peer = Peer(coordinator.role, coordinator.id, 0, process_number(self._own_keys))
        self._reporter = Reporter(coordinator.session)
        self._numbers = itertools.count(1)

    def start(self, watched: Watched) -> None:
        """Start a process and watch it from now on."""
        watched.handle = watched.start(watched.incarnation)
        self.watched.append(watched)

    @property
    def process(self) -> int:
        """The number that identifies this supervision to the coordinator that it starts."""
        return self._peer.process

    @property
    def workers(self) -> list[Watched]:
        """The workers among the processes."""
        return [child for child in self.watched if child.role == WORKER]

    def _running(self, *roles: str) -> list[Watched]:
        return [child for child in self.watched if child.code is None and child.role in (roles or (child.role,))]

    def watch(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker has ended."""
        while self._running(WORKER):
            self.look()
            tick()
            time.sleep(POLL)

    def look(self) -> None:
        """Check every process once, and about once a second ask the coordinator for silent members."""
        for child in self._running():
            code = child.handle.poll()
            if code is not None:
                self._on_end(child, code)
        now = time.monotonic()
        self.end_the_stopped(now)
        if now - self._asked_at > ASK_EVERY and not (self._stopping or self._over):
            self.ask()
            self._asked_at = time.monotonic()
        if self._ended_at is not None and now - self._ended_at > self.coordinator.timeout + GRACE:
            for child in self._running(WORKER):
                self.deaths.append(f"{child} did not end by itself")
                child.handle.send_signal(signal.SIGKILL)
            self._ended_at = now

    def send_signal(self, signum: int) -> None:
        """Send a signal to every running worker. After a signal that ends workers, no worker is started again."""
        if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self._run_ends()
        for child in self._running(WORKER):
            child.handle.send_signal(signum)

    def stop(self, at_once: bool = False) -> None:
        """End the servers, the coordinator and any other running process.

        Args:
            at_once: Whether to end them even if workers still need them.
        """
        self._stopping = True
        for child in self._running():
            if child.reason or is_stopped(child.handle.pid):
                child.end_silent()  # The workers have not waited for it as long as this process has.
                self.deaths.append(f"{child} {child.reason}")
                print(self.deaths[-1], file=sys.stderr, flush=True)
        heard = time.monotonic()
        while not (at_once or self._over or self._ended_at is not None):
            if self.ask():
                heard = time.monotonic()
            # A coordinator on this node lives, and may only be slow.
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
            return  # The decision follows at a later check.
        killed = code < 0 or cut_off
        if code < 0 and child.role == WORKER and not self._over:
            self.ask()
        # Once a worker has finished, the others admit no new one.
        finished = any(worker.code == 0 for worker in self.workers)
        over = (child.role == WORKER and (self._over or finished)) or (child.role == COORDINATOR and self._over)
        replaced = killed and child.restarts > 0 and self._ended_at is None and not over
        how = child.reason or ending(code)
        death = f"{child} {how}"
        if killed or child.role != WORKER:
            self.deaths.append(death)
        if killed:  # A process that ends by itself has printed the reason.
            consequence = "it is started again" if replaced else "it is not replaced"
            if child.restarts and self._over:
                consequence += ": only the first session of a run has restarts"
            print(f"{death}; {consequence}", file=sys.stderr, flush=True)
        if child.role == COORDINATOR:
            if not (replaced or self._over):  # A replaced coordinator continues from its journal.
                self._run_ends()
        elif self._over:
            if child is self.workers[0]:
                self._run_ends()  # The first worker had started the services of the present session.
        elif killed:
            fields = {"role": child.role, "id": child.id, "incarnation": child.incarnation, "process": child.handle.pid}
            self.send("died", {**fields, "how": how, "replaced": replaced})
        elif code < 128:  # From 128 on the code is 128 + a signal's number: the user has stopped the run.
            self.send("end", {"message": death, "clean": False})
        if replaced:
            child.restarts -= 1
            child.incarnation += 1
            child.ended, child.reason = None, ""
            child.handle = child.start(child.incarnation)
            return
        child.code = code
        if child.role == WORKER and not killed:
            self._run_ends()

    def _was_cut_off(self, child: Watched, code: int) -> bool | None:
        """Whether a process has ended by itself after the coordinator had missed it; None if this is not known yet."""
        if not 0 < code < 128 or child.role == COORDINATOR or self._over or self._ended_at is not None:
            return False
        if self.ask():
            return child.member in self._missed
        now = time.monotonic()
        if child.ended is None:
            if not child.restarts or now - self._heard_at < self.coordinator.timeout / 2:
                return False  # The coordinator was reached until now, so it has ended the run and itself.
            child.ended = now
        return None if now - child.ended < self.coordinator.appear else False

    def _run_ends(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()

    def end_the_stopped(self, now: float) -> None:
        """End stopped processes. The coordinator does not miss those that have not registered yet, or have left."""
        # At most one second counts: this process may have been stopped with them, as by Ctrl-Z.
        passed, self._looked_at = min(now - self._looked_at, 1.0), now
        for child in self._running():
            child.stopped = child.stopped + passed if is_stopped(child.handle.pid) else 0.0
            limit = self.coordinator.timeout
            if child.role == COORDINATOR and child.restarts:
                limit /= 2  # The members wait for a coordinator only as long as the time-out, including its restart.
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
        """Ask the coordinator whether its session goes on and which members are silent, and end the silent ones.

        Returns whether the coordinator has answered.
        """
        answer = self.send("status")
        if answer is None:
            return False
        self._heard_at = time.monotonic()
        ended = answer.fields.get("ended")
        if ended is not None and ended["clean"]:
            self._over = True
        elif ended is not None:
            self._run_ends()
        self._missed |= {
            (role, identity, incarnation) for role, identity, incarnation in answer.fields.get("silent", [])
        }
        for child in self._running():
            if child.member in self._missed and child.handle.poll() is None:
                child.end_silent()
        return True

    def send(self, kind: str, fields: Mapping[str, object] | None = None) -> Message | None:
        """Send a request to the coordinator over a new connection, and wait briefly for the answer.

        Requests without an answer are sent again with every later request, so that a busy coordinator hears of every
        death.

        Returns the answer; None if it did not arrive in time.
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
