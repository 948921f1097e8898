"""What has happened to the members of a run: as much of it as is worth showing, and no more."""

from collections import deque
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.roster import Member
from cnnstrategies.paramserver.core.node import Peer

CAME, LEFT, LOST = "came", "left", "lost"
MOST_EVENTS = 4096
MOST_FAULTS = 50
LONGEST = 300  # characters of a fault


class Event(NamedTuple):
    """A process has become a member, or is none any more.

    Attributes:
        at: When.
        role: Its.
        id: Its number.
        life: How many processes had its place before.
        what: It ``came``, ``left`` on purpose or was ``lost``.
    """

    at: float
    role: str
    id: int
    life: int
    what: str


class History:
    """The last events and faults.

    Attributes:
        events: Of members.
        faults: When and what: deaths, returns, restarts.
        losses: How many processes were lost, those included that are forgotten.
        restarts: How many of these were coordinators, each of which this one has followed.
    """

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.faults: deque[tuple[float, str]] = deque(maxlen=MOST_FAULTS)
        self.losses = 0
        self.restarts = 0

    def came(self, now: float, member: Member, returns: bool = True) -> None:
        """A process has become a member.

        Args:
            now: The time.
            member: It.
            returns: Whether one with a later life comes for another that was lost.
        """
        self.events.append(Event(now, *member.peer[:3], CAME))
        if member.peer.life and returns:
            self._note(now, f"{member} has taken the place of the one before")

    def left(self, now: float, peer: Peer) -> None:
        """A member has gone on purpose."""
        self.events.append(Event(now, *peer[:3], LEFT))

    def lost(self, now: float, member: Member, how: str) -> None:
        """A member was lost; what is said later of the same one adds nothing."""
        if any(event[1:] == (*member.peer[:3], LOST) for event in self.events):
            return
        self.events.append(Event(now, *member.peer[:3], LOST))
        self.losses += 1
        self._note(now, f"{member} {how}")

    def begun_again(self, now: float) -> None:
        """This coordinator follows one that was killed."""
        self.losses += 1
        self.restarts += 1
        self._note(now, "the coordinator was started again")

    def _note(self, now: float, text: str) -> None:
        self.faults.append((now, text[:LONGEST]))
