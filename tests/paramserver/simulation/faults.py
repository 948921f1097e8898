"""Faults of a simulated run, drawn from hashes of the run's seed."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cnnstrategies.paramserver.core.node import Peer, Send

_MASK = (1 << 64) - 1
_BEGIN = 0x9E3779B97F4A7C15
_WHOLE = 1 << 53


def draw(*numbers: int, state: int = _BEGIN) -> float:
    """Return a number in [0, 1) that depends only on the given integers (splitmix64)."""
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) / _WHOLE


def mixed(*numbers: int) -> int:
    """Return the state of :func:`draw` after some integers, for many draws that begin with the same integers."""
    state = _BEGIN
    for number in numbers:
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Fault(NamedTuple):
    """A fault of a process at a fixed time.

    Attributes:
        kind: ``kill``, ``crash`` (a supervision with its whole node), ``pause``, ``sleep`` (all processes at once),
            ``cut`` (both directions), ``deaf`` (the process receives nothing) or ``mute`` (nothing that the process
            sends arrives).
        role: Role of the process.
        id: Id of the process.
        at: Virtual time, in seconds.
        seconds: Duration; ignored for deaths, because a killed process stays dead.
    """

    kind: str
    role: str
    id: int
    at: float
    seconds: float

    def __str__(self) -> str:
        length = "" if self.kind in DEADLY else f" for {self.seconds:.2f} s"
        return f"{self.at:.3f} s: {self.kind} {self.role} {self.id}{length}"


DEADLY = ("kill", "crash")
KINDS = ("kill", "kill", "pause", "sleep", "cut", "deaf", "mute")


class Moment(NamedTuple):
    """A fault that hits a message or a process when a message is sent.

    Attributes:
        kind: ``lost``, ``late``, ``doubled``, ``last`` (the sender dies when the message has arrived), or a kind of
            :class:`Fault`.
        seconds: Delay of the message or of its second copy, or duration of a process's fault. A ``cut`` of 0 seconds
            loses the message with its connection. A byte that changes on its way has the same effect, because the
            receiving socket drops the connection.
        victim: Role and id of the process that is hit; None for the message's sender.
    """

    kind: str
    seconds: float = 0.0
    victim: tuple[str, int] | None = None

    @property
    def loses(self) -> bool:
        """Whether the message is lost."""
        return self.kind == "lost" or (self.kind == "cut" and not self.seconds)

    @property
    def hits(self) -> bool:
        """Whether a process is hit before the message is sent."""
        return self.kind in (*KINDS, *DEADLY) and not self.loses


class Network:
    """Links that delay messages and that hit each message with another fault with probability `rate`.

    With `tcp` the messages of a link keep their order and are lost only with their connection. Otherwise each message
    by itself may be lost, doubled or late.
    """

    def __init__(self, seed: int, timeout: float, tcp: bool, rate: float = 0.0) -> None:
        self.counts: Counter[str] = Counter()
        self.timed: list[Fault] = []
        self.tcp = tcp
        self._seed = seed
        self.timeout = timeout
        self._rate = rate
        self._arrivals: dict[int, float] = {}
        self._links: dict[int, tuple[int, int]] = {}

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        """Return the fault that happens because a message is sent, if any."""
        return None

    def chance(self, link: int, ordinal: int) -> Moment | None:
        """Return the fault that hits the `ordinal`-th message of a link by chance, if any."""
        chance = draw(ordinal, state=self._states(link)[1]) if self._rate else 1.0
        if chance >= self._rate:
            return None
        part = chance / self._rate
        if part < (0.5 if self.tcp else 0.4):
            return Moment("lost")
        late = 0.2 * self.timeout * draw(self._seed, 13, link, ordinal)
        if self.tcp or part >= 0.7:
            return Moment("late", late)
        return Moment("doubled", late + 2 * self.timeout * draw(self._seed, 14, link, ordinal) ** 4)

    def arrivals(self, now: float, link: int, ordinal: int, moment: Moment | None) -> list[float]:
        """Return the times at which the `ordinal`-th message of a link arrives: none, one or several."""
        if moment is not None and moment.loses:
            return []
        latency = 0.0002 + 0.002 * draw(ordinal, state=self._states(link)[0])
        soon, late = now + latency, now + (latency + (0.0 if moment is None else moment.seconds))
        if self.tcp:
            arrival = max(late, self._arrivals.get(link, 0.0))
            self._arrivals[link] = arrival
            return [arrival]
        return [soon, late] if moment is not None and moment.kind == "doubled" else [late]

    def _states(self, link: int) -> tuple[int, int]:
        states = self._links.get(link)
        if states is None:
            states = self._links[link] = mixed(self._seed, 11, link), mixed(self._seed, 12, link)
        return states


class Faults(Network):
    """The faults of one seed; half of the seeds have a network like TCP.

    Args:
        places: Role and id of each process that can be hit.
        busy: Seconds within which the faults happen.

    Attributes:
        fatal_messages: The coordinator is killed before it sends each of these messages. Messages are counted over all
            incarnations.
    """

    def __init__(
        self, seed: int, places: Sequence[tuple[str, int]], timeout: float, busy: float, tcp: bool = False
    ) -> None:
        rate = (0.0, 0.05, 0.25)[int(3 * draw(seed, 2))]
        super().__init__(seed, timeout, tcp or draw(seed, 1) < 0.5, rate)
        self.timed = self._drawn(places, busy)
        self.fatal_messages: set[int] = set()
        self._coordinator_messages = 0

    def moment(self, sender: Peer, send: Send) -> Moment | None:
        """Return the fault that happens because a message is sent, if any."""
        if sender.role != "coordinator":
            return None
        self._coordinator_messages += 1
        return Moment("kill") if self._coordinator_messages in self.fatal_messages else None

    def _drawn(self, places: Sequence[tuple[str, int]], busy: float) -> list[Fault]:
        faults = []
        for ordinal in range(int(5 * draw(self._seed, 3))):
            kind = KINDS[int(len(KINDS) * draw(self._seed, 4, ordinal))]
            role, identity = places[int(len(places) * draw(self._seed, 5, ordinal))]
            kind = "crash" if (kind, role) == ("kill", "supervision") else kind
            long = draw(self._seed, 7, ordinal) < 0.5
            part = draw(self._seed, 8, ordinal)
            seconds = self.timeout * (1.5 + 2 * part if long else 0.3 * part)
            faults.append(Fault(kind, role, identity, busy * draw(self._seed, 9, ordinal), seconds))
        return faults
