"""Members that leave while a coordinator may follow: what they alone know must outlive them."""

from collections.abc import Callable
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.roster import WORKER, Member, Roster
from cnnstrategies.paramserver.core.node import Message, Peer
from cnnstrategies.paramserver.core.requests import DONE


class _Leaving(NamedTuple):
    """Who leaves: its request, how many collectives it knows the results of, and the first view without it."""

    request: int
    told: int
    number: int | None


class Departures:
    """Takes those out that leave, and answers them, as soon as they know nothing that the others do not.

    The next coordinator waits for members alone: who knows the result of a collective that another worker does not know
    stays one. It is answered when another has the view without it, and when it has handed over what it was asked for.

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
        """One wants to leave, or has left and wants to be let go; it may ask again.

        Args:
            peer: Who.
            request: The last number of its request.
            told: How many collectives it knows the results of.
        """
        number = self._leaving[peer].number if peer in self._leaving else None
        self._leaving[peer] = _Leaving(request, told, number)

    def ready(self, over: bool) -> list[Member]:
        """Who is to be taken out now.

        Args:
            over: Whether the run is over.
        """
        members = {peer: member for peer in self._leaving if (member := self._roster.find(peer)) is not None}
        stays = self._restartable and not over
        return [one for peer, one in members.items() if not stays or not self._knows_more(self._leaving[peer])]

    def let_go(self, over: bool) -> None:
        """Answer those that need not stay.

        Args:
            over: Whether the run is over.
        """
        for peer, leaving in list(self._leaving.items()):
            if self._roster.find(peer) is not None:
                continue
            if leaving.number is None:
                leaving = self._leaving[peer] = leaving._replace(number=self._roster.number)
            if not over and self._restartable and self._is_needed(peer, leaving):
                continue
            del self._leaving[peer]
            self._send(peer, Message(DONE, request=leaving.request))

    def _is_needed(self, peer: Peer, leaving: _Leaving) -> bool:
        members = self._roster.members
        known = not members or any(one.here >= (leaving.number or 0) for one in members)
        return self._needs(peer) or not known

    def _knows_more(self, leaving: _Leaving) -> bool:
        workers = [self._roster.at(WORKER, one) for one in self._roster.group]
        return any(one is not None and one.told < leaving.told for one in workers)


def known_results(peer: Peer, message: Message) -> int:
    """How many collectives one that leaves knows the results of.

    Raises:
        ControlError: It does not say.
    """
    return message.integer("told") if peer.role == WORKER else 0
