"""What a server sends: to workers over the routes on which they were heard, to other servers over links of its own."""

from collections.abc import Collection
from typing import Any

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import SERVER, SMALL_BYTES, Effects, Header, Kind, Parcel, pack_json


class Outbox:
    """Numbers a server's messages, and keeps them until its driver takes them.

    Messages to another server are numbered without gaps, so that it notices when a connection has lost some.

    Attributes:
        routes: The route to each worker, learned from its last message.
        effects: What is to be done.
    """

    def __init__(self, server: int, session: int) -> None:
        self.routes: dict[int, bytes] = {}
        self.effects: Effects = []
        self._answered: set[int] = set()
        self._server = server
        self._session = session
        self._sequence = 0
        self._view = -1
        self._sent: dict[int, int] = {}
        self._servers: dict[int, ServerInfo] = {}

    def take(self) -> Effects:
        """What is to be done now; it is not kept."""
        if not self.effects:
            return []
        effects, self.effects = self.effects, []
        return effects

    def follow(self, view: View) -> None:
        """Send to the servers of a view from now on, and forget the routes of dead workers."""
        now = {server.id: server for server in view.servers if server.id != self._server}
        before, self._servers = self._servers, now
        gone = {one for one, info in before.items() if now.get(one) != info}
        self.effects = [one for one in self.effects if not (isinstance(one, Parcel) and one.to in gone)]
        # Numbered anew with a new life only: where a connection is made anew, what the old one lost leaves a gap.
        self._sent = {
            one: self._sent[one] if one in before and before[one].since == info.since else 0
            for one, info in now.items()
        }
        self._view = view.number
        alive = {worker.id for worker in view.workers}
        self.routes = {worker: route for worker, route in self.routes.items() if worker in alive}

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send to a worker; nothing happens if none of its messages has come yet.

        Small answers to pulls may wait for each other.
        """
        route = self.routes.get(worker)
        if route is not None:
            self._answered.add(worker)
            self._sequence += 1
            header, body = self._message(kind, self._sequence, payload, fields)
            wait = kind == Kind.PULLED and len(body) <= SMALL_BYTES
            # The values may change before they leave.
            self.effects.append(Parcel(route, header, bytes(body) if wait else body, wait))

    def ask_again(self, worker: int) -> None:
        """Have a worker send again what was not answered."""
        self.to_worker(worker, Kind.WELCOME, json={"again": True})

    def sign(self, heard: Collection[int]) -> None:
        """Give a sign of life to workers that were heard and not answered: who sends much is answered late."""
        for worker in set(heard) - self._answered:
            self.to_worker(worker, Kind.PING)
        self._answered.clear()

    def to_server(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send to another server; nothing happens if it is not in the view."""
        if server in self._servers:
            self._sent[server] += 1
            header, body = self._message(kind, self._sent[server], payload, fields | {"incarnation": self._view})
            self.effects.append(Parcel(server, header, body, False))

    def _message(self, kind: Kind, sequence: int, payload: Any, fields: dict[str, Any]) -> tuple[Header, Any]:
        described = fields.pop("json", None)
        meta = 0
        if described is not None:
            text = pack_json(described)
            meta = len(text)
            payload = text + bytes(payload)
        header = Header(kind, SERVER + self._server, self._session, sequence, meta=meta, length=len(payload), **fields)
        return header, payload
