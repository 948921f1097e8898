"""A member of a run, and what has happened to members."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cnnstrategies.paramserver.core.node import Message, Peer

MOST_LOST = 4096  # of which it is known that they are
MOST_FAULTS = 50
LONGEST = 300  # characters of a fault


@dataclass
class Member:
    """A process that has registered.

    Attributes:
        since: For a server, the number of the first view with it, or of the first one of training if that has waited
            for it.
        figures: What it has last said of itself; see :data:`.window.FIGURES`.
    """

    peer: Peer
    process: int  # its process id, for messages to the user
    host: str
    seen: float  # when its last sign of life came
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = -1  # number of the newest view that it has said to have seen
    came: float = 0.0
    since: int = 0
    asked: int = 0  # the last collective for which a worker has come
    figures: Mapping[str, float] = field(default_factory=dict)
    measured: float = 0.0  # when it has said them

    @classmethod
    def of(cls, peer: Peer, hello: Message, now: float) -> "Member":
        """A process that says hello."""
        host, endpoint, key = (hello.string(name) for name in ("host", "endpoint", "public_key"))
        return cls(peer, hello.integer("process"), host[:255], now, endpoint, key, came=now)

    def __str__(self) -> str:
        return f"{self.peer} (process {self.process} on {self.host})"


class History:
    """The last faults: deaths, returns and restarts, each with its time; and how many there were."""

    def __init__(self) -> None:
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0
        self._lost: deque[tuple[str, int, int]] = deque(maxlen=MOST_LOST)

    def note(self, now: float, text: str) -> None:
        """Something has happened."""
        self.faults.append((now, text[:LONGEST]))

    def lost(self, now: float, member: Member, how: str) -> None:
        """A member was lost; what is said later of the same one adds nothing."""
        if member.peer[:3] in self._lost:
            return
        self._lost.append(member.peer[:3])
        self.losses += 1
        self.note(now, f"{member} {how}")

    def begun_again(self, now: float) -> None:
        """This coordinator follows one that was killed."""
        self.losses += 1
        self.restarts += 1
        self.note(now, "the coordinator was started again")
