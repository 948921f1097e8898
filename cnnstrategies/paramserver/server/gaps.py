"""Which messages of other servers were lost, so that they tell again what matters.

A connection that breaks loses what was on its way, and a server drops what belongs to a view that it does not have yet.
Messages between two servers are numbered without gaps, and every server says a few times a second how often it has
found one: the other then sends the state that its lost messages have led to.
"""

from collections.abc import Collection

from cnnstrategies.paramserver.messages import InvalidMessageError

PING_SECONDS = 0.2
# Between two pings: what is told again may be lost, too, and that told again, which would be ever more.
MOST = 8


class Gaps:
    """The numbers of the messages from each other server.

    Attributes:
        found: How many gaps there were, by server.
    """

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._answered: dict[int, int] = {}
        self._times: dict[int, int] = {}

    def forget(self, servers: Collection[int]) -> None:
        """Begin anew with servers that are gone or others now."""
        for numbers in (self.found, self._last, self._answered):
            for server in servers:
                numbers.pop(server, None)

    def take(self, server: int, sequence: int) -> bool:
        """Count a message; whether some that were sent before it have not come.

        Raises:
            InvalidMessageError: It has come already.
        """
        last = self._last.get(server, 0)
        if sequence <= last:
            raise InvalidMessageError("a replay")
        self._last[server] = sequence
        if sequence == last + 1:
            return False
        self.found[server] = self.found.get(server, 0) + 1
        return True

    def asked(self, server: int, gaps: int) -> bool:
        """Whether a server has found more gaps in this one's messages than have been made good, and may be told now."""
        if gaps <= self._answered.get(server, 0) or self._times.get(server, 0) >= MOST:
            return False
        self._times[server] = self._times.get(server, 0) + 1
        self._answered[server] = gaps
        return True

    def pinged(self) -> None:
        """Servers are told about their gaps; whoever finds more may be told as often as before."""
        self._times = {}
