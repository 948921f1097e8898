"""Traces: runs that somebody can read and write, with faults at moments that messages name.

A file has any number of them::

    the coordinator is killed with the only one that it has told that training begins
      control: workers 2, servers 1, restarts 1
      pace: 306594
      coordinator's 3rd done to worker 1: kill
      worker 1's 2nd hello to coordinator: late by 0.2 s
      0.700 s: pause worker 0 for 0.21 s

The first line says what happens. The second names what is run (the planes of the simulator; other programs have others)
and its plan, where that is not the usual one. ``pace`` is the number from which is drawn how long things take, and
``network`` says whether it is ``tcp`` (the usual) or ``unordered``.

Then come the faults. A moment is when a process sends a message: the n-th of a kind that it has sent, or has sent to
another one, counted from the moment of the line before with ``after that``. A process that is started again is another:
``worker 1 (incarnation 1)``. At that moment

- the message is ``lost``, ``late by`` some seconds, or ``doubled after`` some; or ``cut``: lost with its connection;
- its sender dies before it is sent (``kill``) or when it has arrived (``last``), or is hit by another fault of the
  simulator ``for`` some seconds; or another process is: ``pause server 0 for 0.2 s``.

Lines that begin with ``then`` say what must hold beside all that always must; ``#`` begins a remark.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cnnstrategies.paramserver.core.node import Peer, Send
from simulation.faults import DEADLY, KINDS, Fault, Moment, Network

FOLDER = Path(__file__).parents[1] / "traces"
WHO = r"\w+(?: \d+)?(?: \(incarnation \d+\))?"
PLACE = r"coordinator|(?:worker|server|supervision) \d+"
HIT = rf"(?P<kind>{'|'.join(sorted({*KINDS, *DEADLY}))})(?: (?P<victim>{PLACE}))?(?: for (?P<seconds>[\d.]+) s)?"
TIMED = re.compile(rf"(?P<at>[\d.]+) s: {HIT}")
ON_SEND = re.compile(
    rf"(?P<who>{WHO})'s (?P<ordinal>\d+)(?:st|nd|rd|th) (?P<what>\w+)(?: to (?P<to>{WHO}))?(?P<next> after that)?: "
    rf"(?:(?P<fate>lost|last|late by|doubled after)(?: (?P<delay>[\d.]+) s)?|{HIT})"
)


class TraceError(ValueError):
    """A trace says what nobody understands."""


class Cue(NamedTuple):
    """When a moment comes: as one sends its n-th message of a kind, to somebody or anybody, since the one before."""

    who: str
    ordinal: int
    what: str
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
        return f"{self.who}'s {self.ordinal}{ending} {self.what}{to}{' after that' * self.next}: {fate}"


@dataclass
class Trace:
    """One: what is run (`plane`), what is not as usual of its plan, and what goes wrong."""

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
        """The same with some faults, and no others."""
        some = list(faults)
        timed = [one for one in some if isinstance(one, Fault)]
        return replace(self, timed=timed, cues=[one for one in some if isinstance(one, Cue)])


def read(text: str) -> list[Trace]:
    """The traces of a file."""
    found: list[Trace] = []
    for line in text.splitlines():
        said = line.partition("#")[0].rstrip()
        if not said:
            continue
        if not said.startswith(" "):
            found.append(Trace(said))
        elif not found:
            raise TraceError(f"{said.strip()!r} belongs to no trace: its title comes first, at the beginning of a line")
        else:
            _add(found[-1], said.strip())
    return found


def of(plane: str) -> list[Trace]:
    """The traces of a plane."""
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
        raise TraceError(f"{trace.title}: nobody understands {line!r}")


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for part in text.split(", ") if text else ():
        name, _, value = part.partition(" ")
        yield name, value


def _cue(match: re.Match[str]) -> Cue:
    kind = (match["fate"] or match["kind"]).partition(" ")[0]
    victim = _place(match["victim"]) if match["victim"] else None
    moment = Moment(kind, float(match["delay"] or match["seconds"] or 0), victim)
    return Cue(match["who"], int(match["ordinal"]), match["what"], match["to"], bool(match["next"]), moment)


def _place(text: str) -> tuple[str, int]:
    role, _, identity = text.partition(" ")
    return role, int(identity or 0)


class Cues:
    """The moments of a trace, of one process or of all; those that have not come are `left`."""

    def __init__(self, cues: list[Cue]) -> None:
        self.left = list(cues)
        self._sent: Counter[tuple[str, str, str | None]] = Counter()
        self._from: dict[Cue, int] = {}

    def sends(self, who: str, what: str, to: str) -> Cue | None:
        """The moment that comes with a message, if one does."""
        for receiver in (to, None):
            self._sent[who, what, receiver] += 1
        for number, cue in enumerate(self.left):
            if cue.who != who or (cue.next and any(one.who == who for one in self.left[:number])):
                continue
            counted = self._sent[who, cue.what, cue.to] - self._from.get(cue, 0)
            if cue.what == what and cue.to in (to, None) and counted == cue.ordinal:
                del self.left[number]
                self._begin(who)
                return cue
        return None

    def _begin(self, who: str) -> None:
        """Count from now on for the next moment of a process, where it is to be."""
        following = next((one for one in self.left if one.who == who), None)
        if following is not None and following.next:
            self._from[following] = self._sent[who, following.what, following.to]


def name(peer: Peer) -> str:
    """What a trace calls a process."""
    place = peer.role if peer.role == "coordinator" else f"{peer.role} {peer.id}"
    return f"{place} (incarnation {peer.incarnation})" if peer.incarnation else place


def plan(kind: Callable[..., Any], given: Mapping[str, str]) -> Any:
    """A plan with what a trace says of it: `kind` has numbers, texts and flags; a flag alone is true."""
    usual = inspect.signature(kind).parameters
    if unknown := set(given) - set(usual):
        raise TraceError(f"a plan has no {', '.join(sorted(unknown))}: it has {', '.join(usual)}")
    values = {}
    for name, text in given.items():
        of = type(usual[name].default)
        values[name] = text != "no" if of is bool else of(text)
    return kind(**values)


def given(plan: Any) -> dict[str, str]:
    """What is not usual of a plan, as a trace says it."""
    usual = type(plan)()
    values = [(name, value) for name, value in plan._asdict().items() if value != getattr(usual, name)]
    return {name: str(value) if not isinstance(value, bool) else "" if value else "no" for name, value in values}


def written(trace: Trace) -> str:
    """A trace of the simulator, as a file has it."""
    plan = ", ".join(f"{name} {value}".strip() for name, value in trace.plan.items())
    lines = [f"{trace.plane}: {plan}", f"pace: {trace.pace}", *([] if trace.tcp else ["network: unordered"])]
    for fault in trace.timed:
        who = "" if fault.kind == "sleep" else " " + name(Peer(fault.role, fault.id))
        lines.append(f"{fault.at:.6f} s: {fault.kind}{who}{'' if fault.kind in DEADLY else _for(fault.seconds)}")
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
        """What happens because a message is sent."""
        if not self.cues.left:
            return None
        cue = self.cues.sends(name(sender), send.message.kind, name(send.to))
        return None if cue is None else cue.moment
