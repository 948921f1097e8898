"""Which messages a server acts on: those of the view's members, in their order, with their keys."""

from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import SERVER, Header, InvalidMessageError, Kind
from cnnstrategies.paramserver.server.gaps import Gaps

_FROM_WORKERS = frozenset(
    {Kind.HELLO, Kind.LEAVE, Kind.VALUE, Kind.STATE, Kind.BEGIN, Kind.PUSH, Kind.PULL, Kind.GET_STATE}
)
_FROM_SERVERS = frozenset(
    {
        Kind.STATUS, Kind.VOTE, Kind.DECIDE, Kind.NORM, Kind.SCALE, Kind.RELAY_BEGIN, Kind.RELAY, Kind.ACKNOWLEDGE,
        Kind.COPY_STATE, Kind.COPY, Kind.PING,
    }
)  # fmt: skip


class Senders:
    """The members that may send to a server, and how far each has come.

    Args:
        encrypted: Whether senders have keys.
        gaps: Counts the messages of other servers.
    """

    def __init__(self, encrypted: bool, gaps: Gaps) -> None:
        self._encrypted = encrypted
        self._gaps = gaps
        self._view = View(-1, (), ())
        self._members: dict[int, tuple[int, str]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def follow(self, view: View) -> None:
        """Go on with another view's members."""
        before = {server.id: server.since for server in self._view.servers}
        now = {server.id: server.since for server in view.servers}
        self._gaps.forget([server for server, since in before.items() if now.get(server) != since])
        self._view = view
        self._members = {worker.id: (worker.incarnation, worker.public_key) for worker in view.workers}
        self._members |= {SERVER + server.id: (server.since, server.public_key) for server in view.servers}
        self._last = {peer: last for peer, last in self._last.items() if self._life(peer) == last[0]}

    def _life(self, peer: int) -> int | None:
        return self._members[peer][0] if peer in self._members else None

    def have(self, key: str) -> bool:
        """Whether a key belongs to a member."""
        return any(key == member for _, member in self._members.values())

    def are_joined(self, header: Header, user: str) -> bool:
        """Whether a message shows that the connection with another server holds, whether or not it is acted on."""
        life, key = self._members.get(header.sender, (None, ""))
        return life is not None and life <= header.incarnation and (user == key or not self._encrypted)

    def check(self, header: Header, user: str) -> bool:
        """Check who has sent a message, and count it.

        Args:
            header: The message's.
            user: The key of its connection.

        Returns:
            Whether messages that another server has sent before it have not come.

        Raises:
            InvalidMessageError: It is not to be acted on.
        """
        is_server = header.sender >= SERVER
        life, key = self._members.get(header.sender, (None, ""))
        if life is None or (not is_server and life != header.incarnation):
            raise InvalidMessageError("from no member of the view")
        if is_server and not life <= header.incarnation <= self._view.number:
            raise InvalidMessageError("of a view that is not known here, or of a server that was replaced")
        if self._encrypted and user != key:
            raise InvalidMessageError("a key that is not its sender's")
        if header.kind not in (_FROM_SERVERS if is_server else _FROM_WORKERS):
            raise InvalidMessageError("a kind that its sender does not send")
        if is_server:
            return self._gaps.take(header.sender & ~SERVER, header.sequence)
        if header.sequence <= self._last.get(header.sender, (life, 0))[1]:
            raise InvalidMessageError("a replay")
        self._last[header.sender] = life, header.sequence
        return False
