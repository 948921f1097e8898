"""Members of a run and their places: what is known about each process, and whether another process is expected.

The places are the only record of which processes are alive. The table `PLACE` contains every event that may happen to
a place, and docs/development/states.md has a drawing that is made from the table.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cnnstrategies.paramserver.core.node import Message, Peer, StateTable

MOST_FAULTS = 50  # largest number of faults in the history
LONGEST = 300  # largest number of characters in a fault's description


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        peer: The process's role, id, incarnation and random number.
        process: The operating system's process id, for messages to the user.
        host: Host name of the process.
        endpoint: Address at which a server listens; empty for workers.
        public_key: The process's public CURVE key; empty without encryption.
        acknowledged: Number of the newest view on which the process acts, according to its last report.
        since: For a server: number of the first view that contains this process. If training waited for the server,
            the number of the view with which training began.
        last_collective: For a worker: number of the newest collective to which it has contributed.
        figures: The process's last figures by name; see :func:`.status.figures_of`.
        measured: Time at which the figures arrived.
    """

    peer: Peer
    process: int
    host: str
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = 0
    since: int = 0
    last_collective: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: float = 0.0

    @classmethod
    def from_hello(cls, peer: Peer, hello: Message) -> "Member":
        """Return the member that a registration message, `hello`, describes."""
        host, endpoint, key = (hello.string(name) for name in ("host", "endpoint", "public_key"))
        return cls(peer, hello.integer("process"), host[:255], endpoint, key)

    def __str__(self) -> str:
        return f"{self.peer} (process {self.process} on {self.host})"


class PlaceState(StrEnum):
    """States of a place.

    Attributes:
        EXPECTED: The run waits for the first process of the place.
        RETRIED: The first process has died before it registered, and another process was started instead.
        PRESENT: A member has the place.
        LOST: The last process is dead or counts as dead. Another process may take the place.
        VACANT: The place is free, and the run does not need a process there.
    """

    EXPECTED = "expected"
    RETRIED = "retried"
    PRESENT = "present"
    LOST = "lost"
    VACANT = "vacant"


class PlaceEvent(StrEnum):
    """Events that change the state of a place.

    Attributes:
        REGISTERS: A process becomes the member that has the place.
        GOES: The member is removed. If it was lost and the run goes on, its death follows.
        DIES: The process of the place is dead.
        DIES_AND_RESTARTS: The process of the place is dead, and another process is started in its place.
        IS_GIVEN_UP: The run no longer waits for the first process.
    """

    REGISTERS = "registers"
    GOES = "goes"
    DIES = "dies"
    DIES_AND_RESTARTS = "dies and restarts"
    IS_GIVEN_UP = "is given up"


EXPECTED, RETRIED, PRESENT, LOST, VACANT = PlaceState
REGISTERS, GOES, DIES, DIES_AND_RESTARTS, IS_GIVEN_UP = PlaceEvent
PLACE = StateTable(
    "place of a member",
    EXPECTED,
    {
        EXPECTED: {REGISTERS: PRESENT, DIES: LOST, DIES_AND_RESTARTS: RETRIED, IS_GIVEN_UP: VACANT},
        RETRIED: {REGISTERS: PRESENT, DIES: LOST, DIES_AND_RESTARTS: RETRIED, IS_GIVEN_UP: LOST},
        PRESENT: {GOES: VACANT, IS_GIVEN_UP: PRESENT},
        LOST: {REGISTERS: PRESENT, DIES: LOST, DIES_AND_RESTARTS: LOST, IS_GIVEN_UP: LOST},
        VACANT: {REGISTERS: PRESENT, DIES: LOST, DIES_AND_RESTARTS: LOST, IS_GIVEN_UP: VACANT},
    },
)


class Exit(StrEnum):
    """How a former member has gone.

    Attributes:
        LEFT: It has left on purpose.
        LOST: It was removed because it had died, or was silent.
        SILENT_AT_END: It was removed after the end of the run, because it was silent. If it sends a message later, it
            is not refused as a dead process, but receives the reason why the run ended.
    """

    LEFT = "left"
    LOST = "lost"
    SILENT_AT_END = "silent at end"


@dataclass
class Place:
    """The place for one role and id, for example worker 3. Only one process at a time has the place.

    Attributes:
        state: State of the place; see `PLACE`.
        member: The process that has the place; None unless the state is `PRESENT`.
        incarnation: Lowest incarnation that may register.
        lost: Lowest incarnation whose loss is not in the history yet. The loss of each process is counted once.
        promise: Time by which another process must take the place, and the error message with which the run ends
            otherwise; None if the run does not wait for a process.
    """

    state: PlaceState = PLACE.start
    member: Member | None = None
    incarnation: int = 0
    lost: int = 0
    promise: tuple[float, str] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether no process has registered in this place yet, although the run expects a process."""
        return self.state in (PlaceState.EXPECTED, PlaceState.RETRIED)

    @property
    def is_lost(self) -> bool:
        """Whether the last process of this place has died, and no other process has registered since."""
        return self.state in (PlaceState.LOST, PlaceState.RETRIED)

    def register(self, member: Member) -> None:
        """Give the place to a process, which has registered."""
        self.happen(PlaceEvent.REGISTERS)
        self.member, self.promise = member, None
        self.incarnation = max(self.incarnation, member.peer.incarnation)

    def clear(self) -> None:
        """Take the place from its member."""
        self.happen(PlaceEvent.GOES)
        self.member = None

    def happen(self, event: PlaceEvent) -> None:
        """Change the state after an event."""
        self.state = PLACE.after(self.state, event)


class History:
    """The last faults of the run: deaths of members, replacements of members, and restarts of the coordinator.

    Attributes:
        faults: Time and description of each fault, oldest first.
        losses: Number of processes that the run has lost.
        restarts: Number of times that the coordinator was started again.
    """

    def __init__(self) -> None:
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0

    def note(self, now: float, text: str) -> None:
        """Add a fault to the history. If the history is full, the oldest fault is dropped.

        Args:
            now: The current time.
            text: Description of the fault.
        """
        self.faults.append((now, text[:LONGEST]))

    def note_restart(self, now: float) -> None:
        """Record that this coordinator continues from the journal, because its earlier process was killed."""
        self.losses += 1
        self.restarts += 1
        self.note(now, "the coordinator was started again")
