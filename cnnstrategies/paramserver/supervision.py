"""Watches the processes of one node: restarts those that die, tells the coordinator, and leaves nothing behind."""

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
    """A process that is watched."""

    role: str  # worker, server or coordinator
    id: int
    start: Callable[[int], Handle]  # takes the incarnation
    restarts: int = 0  # how often it may be started again when it is killed
    incarnation: int = 0
    handle: Handle = field(init=False)
    code: int | None = None  # None as long as it runs, or is started again
    stopped: float = 0.0  # for how many seconds it has been
    why: str = ""  # it was ended from here
    ended: float | None = None  # when it has ended by itself while the coordinator was not reached

    def __str__(self) -> str:
        number = "" if self.role == COORDINATOR else f" {self.id}"
        return f"{self.role}{number} (process {self.handle.pid} on {os.uname().nodename})"

    @property
    def member(self) -> tuple[str, int, int]:
        """Who it is to the coordinator."""
        return self.role, self.id, self.incarnation

    def end_silent(self) -> None:
        """End it, and keep why: not whoever stopped or silenced it has killed it."""
        silent = f"was stopped, as by SIGSTOP, for {self.stopped:.0f} s" if self.stopped else "gave no sign of life"
        self.why = self.why or f"{silent}, and is ended"
        self.stopped = 0.0
        self.handle.send_signal(signal.SIGKILL)


class Supervision:
    """Starts this node's processes and watches them until its workers have ended.

    Killed processes (by a signal: a fault) are started again as often as they may be. So are those that end because
    they were cut off from the coordinator, which has missed them; while it is not reached, they are waited with for as
    long as a process may take to appear. One that ends with another error ends the run: it would fail again. The
    coordinator learns of a death at once, and of what follows.

    Services end by themselves when every worker has left their session. Workers that open further sessions start the
    services of these themselves; no worker is started again from then on.

    It holds no socket and no thread while it starts processes, so they may be forked.

    Attributes:
        deaths: What has become of those that have not ended as they should.
    """

    def __init__(self, coordinator: Address, keys: KeyPair | None = None) -> None:
        self.coordinator = coordinator
        self.keys = keys
        self.watched: list[Watched] = []
        self.deaths: list[str] = []
        self._asked_at = self._heard_at = self._looked_at = time.monotonic()
        self._ended_at: float | None = None
        self._over = False  # the session of this coordinator
        self._missed: set[tuple[str, int, int]] = set()  # lives of those that it has heard too long ago
        self._stopping = False
        self._own = None if keys is None else KeyPair.create()
        self._peer = Peer(coordinator.role, coordinator.id, 0, process_number(self._own))
        self._reporter = Reporter(coordinator.session)
        self._numbers = itertools.count(1)

    def start(self, watched: Watched) -> None:
        """Start a process and watch it from now on."""
        watched.handle = watched.start(watched.incarnation)
        self.watched.append(watched)

    @property
    def process(self) -> int:
        """By which the coordinator that this one starts knows it."""
        return self._peer.process

    @property
    def workers(self) -> list[Watched]:
        """The workers among the processes."""
        return [one for one in self.watched if one.role == WORKER]

    def _running(self, *roles: str) -> list[Watched]:
        return [one for one in self.watched if one.code is None and one.role in (roles or (one.role,))]

    def watch(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every worker has ended."""
        while self._running(WORKER):
            self.look()
            tick()
            time.sleep(POLL)

    def look(self) -> None:
        """Look once at every process, and now and then ask the coordinator who has gone silent."""
        for one in self._running():
            code = one.handle.poll()
            if code is not None:
                self._on_end(one, code)
        now = time.monotonic()
        self.end_the_stopped(now)
        if now - self._asked_at > ASK_EVERY and not (self._stopping or self._over):
            self.ask()
            self._asked_at = time.monotonic()
        if self._ended_at is not None and now - self._ended_at > self.coordinator.timeout + GRACE:
            for one in self._running(WORKER):
                self.deaths.append(f"{one} did not end by itself")
                one.handle.send_signal(signal.SIGKILL)
            self._ended_at = now

    def send_signal(self, signum: int) -> None:
        """Send a signal to every worker that runs; after one that ends them, none is started again."""
        if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            self._run_ends()
        for one in self._running(WORKER):
            one.handle.send_signal(signum)

    def stop(self, at_once: bool = False) -> None:
        """End the servers and the coordinator, and whatever still runs; `at_once` also if workers still need them."""
        self._stopping = True
        for one in self._running():
            if one.why or is_stopped(one.handle.pid):
                one.end_silent()  # The workers have not waited for it as long as this process.
                self.deaths.append(f"{one} {one.why}")
                print(self.deaths[-1], file=sys.stderr, flush=True)
        heard = time.monotonic()
        while not (at_once or self._over or self._ended_at is not None):
            if self.ask():
                heard = time.monotonic()
            # Its own coordinator lives, and may be short of a processor.
            elif not self._coordinator_lives() or time.monotonic() - heard > self.coordinator.timeout:
                break
            time.sleep(POLL)
        coordinates = bool(self._running(COORDINATOR))
        if coordinates:
            self.send("end", {"message": "the run is over", "clean": True})
        self._end(SERVER, GRACE)
        if coordinates:
            self.send("stop", {"members": [[one.role, one.id] for one in self.watched]})
        self._end(COORDINATOR, GRACE)
        self._end(WORKER, 0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.stop(at_once=error is not None)

    # Ends

    def _on_end(self, one: Watched, code: int) -> None:
        if self._stopping or code == 0:
            one.code = code
            if one.role == WORKER and not self._stopping:
                self.send("left", {"role": one.role, "id": one.id, "incarnation": one.incarnation})
            return
        cut_off = self._was_cut_off(one, code)
        if cut_off is None:
            return  # It is looked at again.
        killed = code < 0 or cut_off
        if code < 0 and one.role == WORKER and not self._over:
            self.ask()
        # Once a worker has finished, the others let no new one in.
        finished = any(worker.code == 0 for worker in self.workers)
        over = (one.role == WORKER and (self._over or finished)) or (one.role == COORDINATOR and self._over)
        replaced = killed and one.restarts > 0 and self._ended_at is None and not over
        how = one.why or ending(code)
        what = f"{one} {how}"
        if killed or one.role != WORKER:
            self.deaths.append(what)
        if killed:  # Whoever ends by itself has said why.
            follows = "it is started again" if replaced else "it is not replaced"
            if one.restarts and self._over:
                follows += ": only the first session of a run has restarts"
            print(f"{what}; {follows}", file=sys.stderr, flush=True)
        if one.role == COORDINATOR:
            if not (replaced or self._over):  # One that is replaced goes on with its journal.
                self._run_ends()
        elif self._over:
            if one is self.workers[0]:
                self._run_ends()  # It had started the services of the present session.
        elif killed:
            fields = {"role": one.role, "id": one.id, "incarnation": one.incarnation, "process": one.handle.pid}
            self.send("died", {**fields, "how": how, "replaced": replaced})
        elif code < 128:  # 128 + a signal's number: the user has stopped the run.
            self.send("end", {"message": what, "clean": False})
        if replaced:
            one.restarts -= 1
            one.incarnation += 1
            one.ended, one.why = None, ""
            one.handle = one.start(one.incarnation)
            return
        one.code = code
        if one.role == WORKER and not killed:
            self._run_ends()

    def _was_cut_off(self, one: Watched, code: int) -> bool | None:
        """Whether a process has ended by itself after the coordinator had missed it; None if that is to be seen."""
        if not 0 < code < 128 or one.role == COORDINATOR or self._over or self._ended_at is not None:
            return False
        if self.ask():
            return one.member in self._missed
        now = time.monotonic()
        if one.ended is None:
            if not one.restarts or now - self._heard_at < self.coordinator.timeout / 2:
                return False  # Where the coordinator was heard until now, it has ended the run and itself.
            one.ended = now
        return None if now - one.ended < self.coordinator.appear else False

    def _run_ends(self) -> None:
        if self._ended_at is None:
            self._ended_at = time.monotonic()

    def end_the_stopped(self, now: float) -> None:
        """End those that are stopped: the coordinator cannot miss who has not registered yet, or has left."""
        # At most a second: this process may have been stopped with them, as by Ctrl-Z.
        passed, self._looked_at = min(now - self._looked_at, 1.0), now
        for one in self._running():
            one.stopped = one.stopped + passed if is_stopped(one.handle.pid) else 0.0
            limit = self.coordinator.timeout
            if one.role == COORDINATOR and one.restarts:
                limit /= 2  # Its members wait for so long in all.
            if one.stopped > limit:
                one.end_silent()

    def _coordinator_lives(self) -> bool:
        return any(one.handle.poll() is None for one in self._running(COORDINATOR))

    def _end(self, role: str, grace: float) -> None:
        deadline = time.monotonic() + grace
        for one in self._running(role):
            while (code := one.handle.poll()) is None and time.monotonic() < deadline:
                time.sleep(POLL)
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    one.handle.send_signal(signal.SIGKILL)
            while (code := one.handle.poll()) is None:
                time.sleep(POLL)
            one.code = code

    # The coordinator

    def ask(self) -> bool:
        """Ask the coordinator whether its session goes on and who is silent, and end these; whether it has answered."""
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
        for one in self._running():
            if one.member in self._missed and one.handle.poll() is None:
                one.end_silent()
        return True

    def send(self, kind: str, fields: Mapping[str, object] | None = None) -> Message | None:
        """Ask the coordinator over a connection of its own, for a moment; None if it has not answered by then.

        What it has not answered before, it is asked again at every occasion: no death is untold because it was busy.
        """
        number = next(self._numbers)
        answers: dict[int, Message | str] = {}
        with Line(self.coordinator, self._peer, self._own, self.keys) as line:
            loop = Loop(
                self._reporter,
                lambda to, message: line.send(message),
                lambda result: answers.update({result.call: result.value}),
            )
            loop.start()
            loop.act(self._reporter.on_call(time.monotonic(), Call(number, kind, fields or {})))
            until = time.monotonic() + ANSWER_SECONDS
            while number not in answers and (left := until - time.monotonic()) > 0:
                loop.hear(line.receive(loop.until_next(left)))
        answer = answers.get(number)
        return answer if isinstance(answer, Message) and answer.kind == DONE else None
