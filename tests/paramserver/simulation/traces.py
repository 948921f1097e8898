"""Traces: readable descriptions of simulated runs, with faults at the moments at which messages are sent.

A file has any number of traces::

    the coordinator dies, and so does the only worker that knows that training begins
      control: workers 2, servers 1, restarts 1
      pace: 306594
      coordinator's 3rd done to worker 1: kill
      worker 1's 2nd hello to coordinator: late by 0.2 s
      0.700 s: pause worker 0 for 0.21 s

The first line is the title. The second line names the plane of the simulator and the settings of the run's plan that
differ from the plan's defaults. ``pace`` is the seed of all durations. ``network`` is ``tcp`` (the default) or
``unordered``.

The faults follow. A moment is the time at which a process sends its n-th message of a kind, either to a certain
receiver or to any receiver. With ``after that`` the count begins at the moment in the previous line. A process that was
started again is a different process: ``worker 1 (incarnation 1)``. At the moment

- the message is ``lost``, ``late by`` some seconds, ``doubled after`` some seconds, or ``cut`` (lost with its
  connection);
- the sender dies before the message is sent (``kill``) or after the message has arrived (``last``), or another fault
  of the simulator hits the sender ``for`` some seconds. A fault may also hit a different process, as in
  ``pause server 0 for 0.2 s``.

Lines that begin with ``then`` are regular expressions that the run's end must match. ``#`` begins a comment.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cnnstrategies.paramserver.core.node import Peer, Send
from tests.paramserver.simulation.faults import DEADLY, KINDS, Fault, Moment, Network

FOLDER = Path(__file__).parents[1] / "traces"
PROCESS = r"\w+(?: \d+)?(?: \(incarnation \d+\))?"
PLACE = r"coordinator|(?:worker|server|supervision) \d+"
HIT = rf"(?P<kind>{'|'.join(sorted({*KINDS, *DEADLY}))})(?: (?P<victim>{PLACE}))?(?: for (?P<seconds>[\d.]+) s)?"
TIMED = re.compile(rf"(?P<at>[\d.]+) s: {HIT}")
ON_SEND = re.compile(
    rf"(?P<sender>{PROCESS})'s (?P<ordinal>\d+)(?:st|nd|rd|th) (?P<message>\w+)"
    rf"(?: to (?P<to>{PROCESS}))?(?P<next> after that)?: "
    rf"(?:(?P<fate>lost|last|late by|doubled after)(?: (?P<delay>[\d.]+) s)?|{HIT})"
)


class TraceError(ValueError):
    """A trace that cannot be parsed."""


class Cue(NamedTuple):
    """A fault, and the message that triggers it.

    Attributes:
        sender: Name of the process that sends the message.
        ordinal: Position of the message among the sender's messages of this kind and receiver, from 1.
        kind: Kind of the message.
        to: Name of the receiver; None for any receiver.
        next: Whether the count begins at the sender's previous moment.
    """

    sender: str
    ordinal: int
    kind: str
    to: str | None
    next: bool
    moment: Moment

    def __str__(self) -> str:
        kind, seconds, victim = self.moment
        fate = {"late": f"late by {seconds:.6f} s", "doubled": f"doubled after {seconds:.6f} s"}.get(kind, kind)
        if victim is not None:
            fate += " " + name(Peer(*victim))
        if seconds and kind in KINDS:
            fate += _for(seconds)
        ending = {1: "st", 2: "nd", 3: "rd"}.get(self.ordinal % 10 if self.ordinal // 10 % 10 != 1 else 0, "th")
        to = "" if self.to is None else f" to {self.to}"
        return f"{self.sender}'s {self.ordinal}{ending} {self.kind}{to}{' after that' * self.next}: {fate}"


@dataclass
class Trace:
    """The description of one simulated run.

    Attributes:
        plan: Settings of the plan that differ from the defaults, as texts.
        pace: Seed of all durations.
        timed: Faults at fixed times.
        cues: Faults that are triggered by messages.
        then: Regular expressions that the run's end must match.
    """

    title: str
    plane: str = ""
    plan: dict[str, str] = field(default_factory=dict)
    pace: int = 0
    tcp: bool = True
    timed: list[Fault] = field(default_factory=list)
    cues: list[Cue] = field(default_factory=list)
    then: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.title

    def having(self, faults: Iterable[Fault | Cue]) -> "Trace":
        """Return a copy of the trace with exactly the given faults."""
        some = list(faults)
        timed = [fault for fault in some if isinstance(fault, Fault)]
        return replace(self, timed=timed, cues=[fault for fault in some if isinstance(fault, Cue)])


def read(text: str) -> list[Trace]:
    """Return the traces in the text of a file."""
    traces: list[Trace] = []
    for line in text.splitlines():
        content = line.partition("#")[0].rstrip()
        if not content:
            continue
        if not content.startswith(" "):
            traces.append(Trace(content))
        elif not traces:
            raise TraceError(
                f"{content.strip()!r} belongs to no trace: begin with the trace's title, which is not indented"
            )
        else:
            _add(traces[-1], content.strip())
    return traces


def of(plane: str) -> list[Trace]:
    """Return all traces of a plane, from all files."""
    every = [trace for file in sorted(FOLDER.glob("*.txt")) for trace in read(file.read_text())]
    return [trace for trace in every if trace.plane == plane]


def _add(trace: Trace, line: str) -> None:
    name, _, rest = line.partition(": ")
    if not trace.plane:
        trace.plane, trace.plan = name.rstrip(":"), dict(_pairs(rest))
    elif name == "pace":
        trace.pace = int(rest)
    elif name == "network":
        trace.tcp = rest == "tcp"
    elif line.startswith("then "):
        trace.then.append(line.removeprefix("then "))
    elif timed := TIMED.fullmatch(line):
        role, identity = _place(timed["victim"] or "coordinator")
        trace.timed.append(Fault(timed["kind"], role, identity, float(timed["at"]), float(timed["seconds"] or 0)))
    elif cue := ON_SEND.fullmatch(line):
        trace.cues.append(_cue(cue))
    else:
        raise TraceError(f"{trace.title}: cannot parse {line!r}")


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(", ") if text else ():
        name, _, value = part.partition(" ")
        yield name, value


def _cue(match: re.Match[str]) -> Cue:
    kind = (match["fate"] or match["kind"]).partition(" ")[0]
    victim = _place(match["victim"]) if match["victim"] else None
    moment = Moment(kind, float(match["delay"] or match["seconds"] or 0), victim)
    return Cue(match["sender"], int(match["ordinal"]), match["message"], match["to"], bool(match["next"]), moment)


def _place(text: str) -> tuple[str, int]:
    role, _, identity = text.partition(" ")
    return role, int(identity or 0)


class Cues:
    """The moments of a trace, or of one process of a trace.

    Attributes:
        left: The moments that have not come yet.
    """

    def __init__(self, cues: list[Cue]) -> None:
        self.left = list(cues)
        self._sent: Counter[tuple[str, str, str | None]] = Counter()
        self._from: dict[Cue, int] = {}

    def sends(self, sender: str, kind: str, to: str) -> Cue | None:
        """Count a message, and return the moment that the message triggers, if any."""
        for receiver in (to, None):
            self._sent[sender, kind, receiver] += 1
        for number, cue in enumerate(self.left):
            if cue.sender != sender or (cue.next and any(other.sender == sender for other in self.left[:number])):
                continue
            counted = self._sent[sender, cue.kind, cue.to] - self._from.get(cue, 0)
            if cue.kind == kind and cue.to in (to, None) and counted == cue.ordinal:
                del self.left[number]
                self._begin(sender)
                return cue
        return None

    def _begin(self, sender: str) -> None:
        """Begin the count for the next moment of a process, if this moment counts from the previous one."""
        following = next((cue for cue in self.left if cue.sender == sender), None)
        if following is not None and following.next:
            self._from[following] = self._sent[sender, following.kind, following.to]


def name(peer: Peer) -> str:
    """Return the name of a process in traces."""
    place = peer.role if peer.role == "coordinator" else f"{peer.role} {peer.id}"
    return f"{place} (incarnation {peer.incarnation})" if peer.incarnation else place


def plan(kind: Callable[..., Any], settings: Mapping[str, str]) -> Any:
    """Return a plan of class `kind` with a trace's settings.

    The settings are numbers, texts and flags. A flag without a value is true.
    """
    usual = inspect.signature(kind).parameters
    if unknown := set(settings) - set(usual):
        raise TraceError(f"a plan has no {', '.join(sorted(unknown))}: it has {', '.join(usual)}")
    values = {}
    for name, text in settings.items():
        setting_type = type(usual[name].default)
        values[name] = text != "no" if setting_type is bool else setting_type(text)
    return kind(**values)


def changed_settings(plan: Any) -> dict[str, str]:
    """Return the settings of a plan that differ from the defaults, as texts of a trace."""
    usual = type(plan)()
    values = [(name, value) for name, value in plan._asdict().items() if value != getattr(usual, name)]
    return {name: str(value) if not isinstance(value, bool) else "" if value else "no" for name, value in values}


def as_text(trace: Trace) -> str:
    """Return a trace as the text of a file."""
    plan = ", ".join(f"{name} {value}".strip() for name, value in trace.plan.items())
    lines = [f"{trace.plane}: {plan}", f"pace: {trace.pace}", *([] if trace.tcp else ["network: unordered"])]
    for fault in trace.timed:
        victim = "" if fault.kind == "sleep" else " " + name(Peer(fault.role, fault.id))
        lines.append(f"{fault.at:.6f} s: {fault.kind}{victim}{'' if fault.kind in DEADLY else _for(fault.seconds)}")
    return "\n  ".join((trace.title, *lines, *map(str, trace.cues)))


def _for(seconds: float) -> str:
    return f" for {seconds:.6f} s"


class Script(Network):
    """The faults of a trace."""

    def __init__(self, trace: Trace, timeout: float) -> None:
        super().__init__(trace.pace, timeout, trace.tcp)
        self.timed = list(trace.timed)
        self.cues = Cues(trace.cues)

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        """Return what happens because a message is sent, or None."""
        if not self.cues.left:
            return None
        cue = self.cues.sends(name(sender), send.message.kind, name(send.to))
        return None if cue is None else cue.moment
