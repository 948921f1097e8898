"""Members that leave while a coordinator may follow: what they alone know must outlive them."""

from collections.abc import Callable
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.roster import WORKER, Roster
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import DONE


class _Leaving(NamedTuple):
    """Who leaves: its request, the view without it, and how many collectives it knows the results of."""

    request: int
    number: int
    told: int


class Departures:
    """Answers those that leave, as soon as the others know what they alone could tell the next coordinator.

    Args:
        restartable: Whether a coordinator that is killed is started again.
        roster: The members.
        needs: Whether one is to hand over something first.
        send: Sends a message.
    """

    def __init__(
        self,
        restartable: bool,
        roster: Roster,
        needs: Callable[[Peer], bool],
        send: Callable[[Peer, Message], None],
    ) -> None:
        self._restartable = restartable
        self._roster = roster
        self._needs = needs
        self._send = send
        self._leaving: dict[Peer, _Leaving] = {}

    def ask(self, peer: Peer, request: int, told: int) -> None:
        """One that has left wants to be let go; it may ask again.

        Args:
            peer: Who.
            request: The last number of its request.
            told: How many collectives it knows the results of.
        """
        number = self._leaving[peer].number if peer in self._leaving else self._roster.number
        self._leaving[peer] = _Leaving(request, number, told)

    def let_go(self, over: bool) -> None:
        """Answer those that need not stay.

        Args:
            over: Whether the run is.
        """
        for peer, leaving in list(self._leaving.items()):
            if not over and self._restartable and self._is_needed(peer, leaving):
                continue
            del self._leaving[peer]
            self._send(peer, Message(DONE, request=leaving.request))

    def _is_needed(self, peer: Peer, leaving: _Leaving) -> bool:
        members = self._roster.members
        workers = [one for one in members if one.peer.role == WORKER and one.peer.id in self._roster.group]
        known = not members or any(one.here >= leaving.number for one in members)
        return self._needs(peer) or not known or any(one.told < leaving.told for one in workers)


def known_results(peer: Peer, message: Message) -> int:
    """How many collectives one that leaves knows the results of.

    Raises:
        ControlError: It does not say.
    """
    return message.integer("told") if peer.role == WORKER else 0
