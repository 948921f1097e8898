"""Virtual time for roles, their programs and the links between them: the same seed always gives the same events."""

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from cnnstrategies.paramserver.core.node import (
    Call,
    CalledRole,
    ControlError,
    Effects,
    End,
    Message,
    Peer,
    Return,
    Role,
    Send,
    Timer,
)
from tests.paramserver.simulation.faults import DEADLY, Fault, Moment, Network, draw
from tests.paramserver.simulation.traces import Cue, name


class Sleep(NamedTuple):
    """Request of a program: let some seconds of virtual time pass, as if the program computed."""

    seconds: float


class Until(NamedTuple):
    """Request of a program: wait until a condition holds."""

    holds: Callable[[], bool]


class Ask(NamedTuple):
    """Request of a program: call its role and wait for the result.

    Attributes:
        patience: Seconds after which the program gets None instead of a result; None waits without a limit.
    """

    kind: str
    fields: Mapping[str, Any] = {}
    frames: Sequence[bytes] = ()
    patience: float | None = None


class Tell(NamedTuple):
    """Request of a program: call its role without waiting for a result."""

    kind: str
    fields: Mapping[str, Any] = {}


Program = Generator[Ask | Tell | Sleep | Until, Any, None]
LOOK = 0.02  # Seconds between two checks of the condition for which a program waits.


class EndedError(Exception):
    """Raised in a program whose role has ended and therefore has no result for the program."""


@dataclass
class Process:
    """A simulated process: a role that receives messages, and the program that calls the role.

    Attributes:
        ended: The role's reason to end; None while the role goes on.
        done: Whether the program has returned.
        drift: Speed of the process's clock, relative to virtual time.
        missed: Actions that wait until a paused process goes on.
        timers: Time of the process's clock at which each timer fires, by name.
        waits: Number of the call for whose result the program waits; 0 if it does not wait for a call.
        calls: Number of calls so far that have a result.
    """

    peer: Peer
    role: Any
    program: Program
    alive: bool = True
    ended: End | None = None
    done: bool = False
    drift: float = 1.0
    paused_until: float = 0.0
    missed: list[Callable[[], None]] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    waits: int = 0
    calls: int = 0

    def __str__(self) -> str:
        return f"{self.peer}" + (f" (incarnation {self.peer.incarnation})" if self.peer.incarnation else "")


class World:
    """All processes and their events. A new incarnation of a process replaces the one before it.

    Attributes:
        progress: Virtual time at which a program last received a result.
        trace: One line for each event; None if no trace is written.
        cues: The moments at which messages were hit by faults; empty without a trace.
        on_lost: Called for each lost message with its sender, its receiver and whether one of the two is cut off.
        on_node: Returns the processes that run on a node, except the node's supervision.
        on_fault: Called with each fault that hits a process because a message is sent.
        tcp: Whether messages that a killed process has sent may be lost with its connections.
    """

    def __init__(self, seed: int, faults: Network) -> None:
        self.now = 0.0
        self.events = 0
        self.faults = faults
        self.processes: dict[tuple[str, int], Process] = {}
        self.progress = 0.0
        self.trace: list[str] | None = None
        self.cues: list[Cue] = []
        self.on_send: Callable[[Process, Send], None] = lambda sender, send: None
        self.on_lost: Callable[[Peer, Peer, bool], None] = lambda sender, receiver, cut: None
        self.on_death: Callable[[Process], None] = lambda process: None
        self.on_node: Callable[[int], list[Process]] = lambda node: []
        self.on_step: Callable[[Process], None] = lambda process: None
        self.on_fault: Callable[[Fault], None] = lambda fault: None
        self.on_return: Callable[[Process, int, Message | str | None], None] = lambda process, call, value: None
        self.tcp = False
        self._seed = seed
        self._died_at: dict[Peer, float] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sent: dict[int, int] = {}
        self._sent_counts: Counter[tuple[str, str, str]] = Counter()
        self._links: dict[tuple[str, int, str, int], int] = {}
        self._blocked: dict[tuple[str, int, bool], float] = {}
        self._asleep_until = 0.0
        for fault in faults.timed:
            self.at(fault.at, lambda fault=fault: self.strike(fault))  # type: ignore[misc]

    # Processes

    def spawn(self, peer: Peer, role: Role, program: Program | None = None) -> Process:
        """Start a process. Without a program, the process only handles messages and timers."""
        process = Process(peer, role, program or _idle())
        # A coordinator that follows another runs on the same machine, so it has the same clock.
        clock = peer.incarnation if peer.role != "coordinator" else 0
        process.drift = 1.0 + 0.02 * (draw(self._seed, 21, *map(ord, peer.role), peer.id, clock) - 0.5)
        self.processes[peer.role, peer.id] = process
        for outgoing in (False, True):  # A cut hit the previous process in this place, not the new process.
            self._blocked.pop((peer.role, peer.id, outgoing), None)
        self.note(f"{process} starts")
        if self.now < self._asleep_until:
            self._pause(process, self._asleep_until)
        self._run(process, partial(self._act, process, role.start))
        self.at(self.now, partial(self._run, process, partial(self._resume, process, 0, None)))
        return process

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Schedule an action at a virtual time."""
        self.events += 1
        heapq.heappush(self._heap, (time, self.events, action))

    def step(self) -> bool:
        """Run the next event; return False if no event is left."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True

    def note(self, text: str) -> None:
        """Write a line to the trace, if the world has one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.4f}  {text}")

    def tell(self, process: Process, call: Call) -> None:
        """Call a process's role from outside, without a message; later, if the process is paused or cut off."""
        place = (process.peer.role, process.peer.id)
        reached = max(self._blocked.get((*place, outgoing), 0.0) for outgoing in (False, True))
        if reached > self.now:
            self.at(reached, lambda: self.tell(process, call))
        else:
            self._run(process, partial(self._hear, process, call))

    def _hear(self, process: Process, call: Call) -> None:
        if process.ended is None:
            self._call(process, call)

    @property
    def end(self) -> str:
        """The end of each worker, as one line of text."""
        return "; ".join(
            f"{process} {_end(process)}" for (role, _), process in sorted(self.processes.items()) if role == "worker"
        )

    def kill(self, process: Process) -> None:
        """Kill a process at once."""
        if process.alive:
            process.alive = False
            self._died_at[process.peer] = self.now
            process.program.close()
            self.note(f"{process} is killed")
            self.on_death(process)

    # Faults

    def strike(self, fault: Fault) -> None:
        """Apply a fault now."""
        if fault.kind == "sleep":
            self._sleep(fault)
            return
        if fault.kind == "crash":
            for child in self.on_node(fault.id):
                self.kill(child)
        process = self.processes.get((fault.role, fault.id))
        if process is None or not process.alive or process.ended is not None:
            return
        self.faults.counts[f"{fault.kind} {fault.role}"] += 1
        self.note(f"FAULT {fault}")
        until = self.now + fault.seconds
        if fault.kind in DEADLY:
            self.kill(process)
        elif fault.kind == "pause":
            self._pause(process, until)
        else:
            for outgoing in (True, False):
                if fault.kind != ("deaf" if outgoing else "mute"):
                    self._blocked[fault.role, fault.id, outgoing] = until

    def _sleep(self, fault: Fault) -> None:
        self.faults.counts["sleep"] += 1
        self.note(f"FAULT {fault}")
        self._asleep_until = max(self._asleep_until, self.now + fault.seconds)
        for process in self.processes.values():
            self._pause(process, self._asleep_until)

    def _pause(self, process: Process, until: float) -> None:
        process.paused_until = max(process.paused_until, until)
        self.at(until, lambda: self._wake(process))

    def _wake(self, process: Process) -> None:
        if self.now >= process.paused_until:
            missed, process.missed = process.missed, []
            for action in missed:
                self._run(process, action)  # `_run` checks again: an earlier action may have killed the process.

    def _run(self, process: Process, action: Callable[[], None]) -> None:
        """Run an action in a process that lives; later, if the process is paused."""
        if not process.alive:
            return
        if self.now < process.paused_until:
            process.missed.append(action)
        else:
            action()

    # Roles

    def _act(self, process: Process, function: Callable[..., Effects], *arguments: object) -> None:
        """Call a function of a role with the time of the process's clock, and carry out the effects."""
        try:
            effects = function(self.now * process.drift, *arguments)
        except ControlError as error:
            self.note(f"{process} drops a message: {error}")
            return
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._send(process, effect)  # type: ignore[arg-type]
                if not process.alive:
                    break
            elif kind is Timer:
                self._set_timer(process, effect)  # type: ignore[arg-type]
            elif isinstance(effect, Return):
                self._return(process, effect.call, effect.value)
            elif process.ended is None and isinstance(effect, End):
                self.note(f"{process} ends: {effect.reason}")
                process.ended = effect
        self.on_step(process)

    def _send(self, sender: Process, send: Send) -> None:
        self.on_send(sender, send)
        if self.trace is not None:
            self._sent_counts[name(sender.peer), send.message.kind, name(send.to)] += 1
        moment = self.faults.moment(sender.peer, send)
        if moment is not None and moment.hits:
            self._record_hit(moment, sender, send)
            role, identity = moment.victim or (sender.peer.role, sender.peer.id)
            fault = Fault(moment.kind, role, identity, self.now, moment.seconds)
            self.faults.timed.append(fault)
            self.on_fault(fault)
            self.strike(fault)
            if not sender.alive:
                return
        ends = (sender.peer.role, sender.peer.id, send.to.role, send.to.id)
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = _link(ends)
        ordinal = self._sent[link] = self._sent.get(link, -1) + 1
        blocked = self._blocked
        cut = blocked.get((ends[0], ends[1], True), 0.0) > self.now or blocked.get((*ends[2:], False), 0.0) > self.now
        fate = self.faults.chance(link, ordinal) if not cut and (moment is None or moment.hits) else moment
        arrivals = [] if cut else self.faults.arrivals(self.now, link, ordinal, fate)
        if fate is not None:
            self._record_hit(fate, sender, send)
            if fate.kind == "last":
                until = max(arrivals, default=self.now)
                self.at(until, lambda: self.kill(sender))
                self._pause(sender, until)
        if self.trace is not None:
            arrived = "" if len(arrivals) == 1 else f"  [{'cut' if cut else 'lost' if not arrivals else 'doubled'}]"
            self.note(f"{sender} -> {send.to}: {send.message.kind} {_short(send.message)}{arrived}")
        if not arrivals:
            self.on_lost(sender.peer, send.to, cut)
        for arrival in arrivals:
            self.at(arrival, partial(self._deliver, sender.peer, send, link))

    def _record_hit(self, moment: Moment, sender: Process, send: Send) -> None:
        self.faults.counts[moment.kind] += 1
        if self.trace is not None:
            source, kind, target = name(sender.peer), send.message.kind, name(send.to)
            self.cues.append(Cue(source, self._sent_counts[source, kind, target], kind, target, False, moment))

    def _deliver(self, sender: Peer, send: Send, link: int) -> None:
        if self.tcp and sender in self._died_at and draw(self._seed, 15, link, sender.incarnation) < 0.5:
            self.faults.counts["lost with a process"] += 1
            self.note(f"a message of {sender} to {send.to} is lost with its sender: {send.message.kind}")
            return
        process = self.processes.get((send.to.role, send.to.id))
        if process is None or process.ended is not None or (process.peer != send.to and send.to.role != "coordinator"):
            return
        self._run(process, partial(self._act, process, process.role.on_message, sender, send.message))

    def _set_timer(self, process: Process, timer: Timer) -> None:
        if timer.at is None:
            process.timers.pop(timer.name, None)
            return
        process.timers[timer.name] = timer.at
        at = max(self.now, timer.at / process.drift)
        self.at(at, partial(self._run, process, partial(self._fire, process, timer.name, timer.at)))

    def _fire(self, process: Process, name: str, at: float | None) -> None:
        if process.ended is None and process.timers.get(name) == at:
            del process.timers[name]
            self._act(process, process.role.on_timer, name)

    # Programs

    def _return(self, process: Process, number: int, value: Message | str | None) -> None:
        self.on_return(process, number, value)
        if number and number == process.waits:
            process.waits = 0
            self.at(self.now, partial(self._run, process, partial(self._resume, process, number, value)))

    def _resume(self, process: Process, call: int, value: Message | str | None) -> None:
        if not process.alive or process.done:
            return
        if call and process.peer.role != "supervision":
            self.progress = self.now
        try:
            program = process.program
            wanted = program.throw(EndedError(value)) if isinstance(value, str) else program.send(value)
            while isinstance(wanted, Tell):
                self._call(process, Call(0, wanted.kind, wanted.fields))
                wanted = program.send(None)
        except (StopIteration, EndedError):
            process.done = True
            return
        if isinstance(wanted, Sleep):
            self.at(self.now + wanted.seconds, partial(self._run, process, partial(self._resume, process, 0, None)))
        elif isinstance(wanted, Until):
            self._look(process, wanted)
        else:
            number = process.waits = process.calls = process.calls + 1
            if wanted.patience is not None:
                self.at(self.now + wanted.patience, lambda: self._return(process, number, None))
            self._call(process, Call(number, wanted.kind, wanted.fields, wanted.frames))

    def _call(self, process: Process, call: Call) -> None:
        if self.trace is not None:
            self.note(f"{process} calls {call.kind} {dict(call.fields)}")
        self._act(process, cast(CalledRole, process.role).on_call, call)

    def _look(self, process: Process, until: Until) -> None:
        if not process.alive:
            return
        if process.ended is not None:
            self._run(process, lambda: self._resume(process, 0, process.ended.reason if process.ended else ""))
        elif until.holds():
            self._run(process, partial(self._resume, process, 0, None))
        else:
            self.at(self.now + LOOK, partial(self._look, process, until))


def _idle() -> Program:
    while True:
        yield Sleep(1000.0)


def _end(process: Process) -> str:
    if process.ended is not None and not process.ended.clean:
        return f"ends: {process.ended.reason}"
    if process.done or process.ended is not None:
        return "comes to the end"
    return "goes on" if process.alive else "is dead"


ROLES = ("coordinator", "supervision", "server", "worker")


def _link(ends: tuple[str, int, str, int]) -> int:
    sender, number, receiver, other = ends
    return ((ROLES.index(sender) << 16 | number) << 20) | ROLES.index(receiver) << 16 | other


def _short(message: Message) -> str:
    header = message.fields.get("header")
    if header is not None:
        return f"key {header.key} step {header.step} base {header.base} number {header.sequence}"
    fields = {name: value for name, value in message.fields.items() if name not in ("session", "floor")}
    if "view" in fields and isinstance(fields["view"], dict):
        view = fields["view"]
        workers = [f"{id}.{incarnation}" for id, incarnation, _ in view["workers"]]
        servers = [f"{id} since {since}" for id, _, _, since in view["servers"]]
        fields["view"] = f"{view['number']}: workers {workers}, servers {servers}, lost {[*view['lost']]}"
    return f"#{message.request} {fields}" if message.request else f"{fields}"
