"""What a server sends: to workers over its ROUTER, to other servers over a DEALER for each."""

from collections.abc import Collection
from typing import Any

from cnnstrategies.paramserver.core.view import ServerInfo, View
from cnnstrategies.paramserver.messages import SERVER, Header, Kind, pack_json
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.transport import SMALL_BYTES, Bundle, Context, Socket, client_socket


class Post:
    """Sends a server's messages. Nothing here waits.

    Messages to another server are numbered without gaps, so that it notices when a connection has lost some.

    Args:
        context: The process's context.
        server: Id of this server.
        session: The run's number.
        keys: CURVE keys; None for no encryption.
        largest: Bytes of the largest frame.
        router: This server's ROUTER.

    Attributes:
        routes: The route to each worker, learned from its last message.
    """

    def __init__(
        self, context: Context, server: int, session: int, keys: KeyPair | None, largest: int, router: Socket
    ) -> None:
        self.routes: dict[int, bytes] = {}
        self._answered: set[int] = set()
        self._context = context
        self._server = server
        self._session = session
        self._keys = keys
        self._largest = largest
        self._router = router
        self._sequence = 0
        self._view = -1
        self._sent: dict[int, int] = {}
        self._servers: dict[int, ServerInfo] = {}
        self._dealers: dict[int, Socket] = {}
        self._to_workers: dict[int, Bundle] = {}

    def follow(self, view: View) -> None:
        """Connect to the servers of a view, drop those that are gone or replaced, and the routes of dead workers."""
        now = {server.id: server for server in view.servers if server.id != self._server}
        for server in list(self._dealers):
            if now.get(server) != self._servers[server]:
                self._dealers.pop(server).close(linger=0)
        self._servers = now
        self._view = view.number
        for server, info in now.items():
            if server not in self._dealers:
                self._sent[server] = 0
                self._dealers[server] = client_socket(self._context, info, self._keys, self._largest)
        alive = {worker.id for worker in view.workers}
        self.routes = {worker: route for worker, route in self.routes.items() if worker in alive}
        self._to_workers = {worker: bundle for worker, bundle in self._to_workers.items() if worker in alive}

    def to_worker(self, worker: int, kind: Kind, payload: Any = b"", **fields: Any) -> None:
        """Send to a worker; nothing happens if none of its messages has come yet.

        Small answers to pulls wait for each other, until :meth:`flush` or something else is sent to the worker.
        """
        route = self.routes.get(worker)
        if route is not None:
            self._answered.add(worker)
            self._sequence += 1
            header, body = self._message(kind, self._sequence, payload, fields)
            bundle = self._to_workers.get(worker)
            if bundle is None or bundle.route != route:
                bundle = self._to_workers[worker] = Bundle(self._router, route)
            wait = kind == Kind.PULLED and len(body) <= SMALL_BYTES
            bundle.send(header, bytes(body) if wait else body, wait)  # The values may change before they leave.

    def flush(self) -> None:
        """Send what waits."""
        for bundle in self._to_workers.values():
            bundle.flush()

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
        if server in self._dealers:
            self._sent[server] += 1
            header, body = self._message(kind, self._sent[server], payload, fields | {"incarnation": self._view})
            Bundle(self._dealers[server]).send(header, body)

    def _message(self, kind: Kind, sequence: int, payload: Any, fields: dict[str, Any]) -> tuple[Header, Any]:
        described = fields.pop("json", None)
        meta = 0
        if described is not None:
            text = pack_json(described)
            meta = len(text)
            payload = text + bytes(payload)
        header = Header(kind, SERVER + self._server, self._session, sequence, meta=meta, length=len(payload), **fields)
        return header, payload

    def close(self) -> None:
        """Close the sockets to other servers."""
        for dealer in self._dealers.values():
            dealer.close()
