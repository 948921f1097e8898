"""A worker's state about the servers: each slice's primary, messages to send, waits for replies, silent servers."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from cnnstrategies.paramserver.core.node import Lasting, Liveness
from cnnstrategies.paramserver.core.view import RemovedError, ServerInfo, ServersUnreachableError, View
from cnnstrategies.paramserver.messages import HEADER_BYTES, SERVER, Header, Kind, Parcel, compose
from cnnstrategies.paramserver.slicing import Slice, holders
from cnnstrategies.paramserver.specification import Specification

PROBE_SECONDS = 1.0  # If a server has not replied to a pull for this time, the worker sends a HELLO message to it.
REPEAT_SECONDS = 0.05  # seconds between two calls of `Wait.repeat`
STOPPED_SECONDS = 1.0  # If more seconds pass between two calls of `on_time`, this process was stopped.


class Wait(NamedTuple):
    """A wait that a procedure yields to the driver. The driver resumes the procedure when the wait is over.

    Attributes:
        waiting: Function that returns whether the procedure still has to wait.
        repeat: Function that is called when the wait begins, and then every `REPEAT_SECONDS` until the wait is over;
            None if nothing must be repeated.
    """

    waiting: Callable[[], bool]
    repeat: Callable[[], object] | None = None


class Connections:
    """A worker's connections to the servers of the current view, without the sockets.

    This class numbers the outgoing messages, and decides which servers are silent.

    Attributes:
        liveness: The book of liveness of the servers. Their silence is counted while this worker waits.
        view: The current view.
        owners: By the slice's key: a pair of the primary's server id and the number of the view in which the primary's
            process first appeared. The id is -1 if no live server holds the slice, and before the first view.
        sequence: Sequence number of the last message in :attr:`parcels`.
        parcels: Queue of messages; the driver calls :meth:`take`, and sends them.
    """

    def __init__(self, specification: Specification, slices: Sequence[Slice], id: int, incarnation: int) -> None:
        self.liveness: Liveness[int] = Liveness(min(STOPPED_SECONDS, specification.timeout / 4))
        self.view = View(-1, (), ())
        self.owners: list[tuple[int, int]] = [(-1, 0)] * len(slices)
        self.sequence = 0
        self.parcels: list[Parcel] = []
        self._specification = specification
        self._patience = specification.patience
        self._slices = slices
        self._id = id
        self._incarnation = incarnation
        self._servers: dict[int, ServerInfo] = {}
        self._last: dict[int, int] = {}  # By server id: sequence number of the server's last message.
        # By server id: times of the first and the last message of the server's process. Here pauses of this process
        # count, because a server may have died in a pause.
        self._received: dict[int, tuple[float, float]] = {}
        # By server id: time at which this worker last probed the server, or received the server's reply to a pull.
        self._probed: dict[int, float] = {}
        self._has_orphans = Lasting(False)  # whether at least one slice has no primary
        self._meet_deadline = 0.0
        self._was_member = False

    # Membership

    def begin_meeting(self) -> None:
        """Start the time-out within which this worker and all servers must be in the view; see :meth:`met`."""
        self._meet_deadline = self.liveness.now + self._specification.timeout

    def met(self) -> bool:
        """Return whether this worker and all servers are in the current view.

        A dead server need not be in the view if other servers hold its slices.

        Raises:
            ServersUnreachableError: The time-out has passed, and this worker or a server is missing.
        """
        missing = self._missing - {*self.view.lost}
        if not missing and self._is_member():
            self._was_member = True
            return True
        if self.liveness.now > self._meet_deadline:
            members = f"servers {sorted(missing)}" if missing else f"worker {self._id} itself"
            raise ServersUnreachableError(
                f"worker {self._id}: {members} did not join within {self._specification.timeout} s: look at the logs "
                f"of {members}, or raise timeout"
            )
        return False

    @property
    def _missing(self) -> set[int]:
        return set(range(self._specification.servers)) - self.servers

    @property
    def servers(self) -> set[int]:
        """Ids of the servers in the current view."""
        return {server.id for server in self.view.servers}

    @property
    def has_lowest_id(self) -> bool:
        """Whether no worker of the current view has a lower id than this worker."""
        return all(self._id <= worker.id for worker in self.view.workers)

    @property
    def is_first_source(self) -> bool:
        """Whether this worker sends the initial values to the servers.

        The worker with the lowest id sends them. Workers that replace an earlier process come last, because most of
        them do not have initial values.
        """
        source = min(((worker.incarnation > 0, worker.id) for worker in self.view.workers), default=None)
        return source == (self._incarnation > 0, self._id)

    def _is_member(self) -> bool:
        return any((worker.id, worker.incarnation) == (self._id, self._incarnation) for worker in self.view.workers)

    def follow(self, view: View) -> bool:
        """Replace the current view by a newer view. Return whether the servers of the view have changed.

        If `view` is not newer than the current view, it is ignored.

        Raises:
            RemovedError: The new view no longer contains this worker.
        """
        if view.number <= self.view.number:
            return False
        self.view = view
        if self._was_member and not self._is_member():
            raise RemovedError(
                f"worker {self._id} (incarnation {self._incarnation}) is no longer in the view (number {view.number}): "
                "the coordinator counts the worker as dead; start the worker again as a new incarnation"
            )
        before, self._servers = self._servers, {server.id: server for server in view.servers}
        for server, info in self._servers.items():
            if before.get(server) != info:
                self.liveness.hear(server)
        gone = {server for server, info in before.items() if self._servers.get(server) != info}
        for server in gone:
            self._last.pop(server, None)
            self._received.pop(server, None)
        for server in before.keys() - self._servers.keys():
            del self.liveness.heard[server]
        self.parcels = [parcel for parcel in self.parcels if parcel.to not in gone]
        return before != self._servers

    # Slices

    def place(self) -> list[int]:
        """Determine each slice's primary in the current view. Return the keys of the slices whose primary has changed.

        A server that was started again counts as a different primary.
        """
        since = {server.id: server.since for server in self.view.servers}
        before = self.owners
        primaries = [next(iter(holders(slice_, self.view)), -1) for slice_ in self._slices]
        self.owners = [(primary, since.get(primary, 0)) for primary in primaries]
        return [key for key, owner in enumerate(self.owners) if owner != before[key]]

    def primary(self, key: int) -> int:
        """Return the id of the server that is a slice's primary. Return -1 if no live server holds the slice."""
        return self.owners[key][0]

    def of(self, server: int) -> list[int]:
        """Return the keys of the slices whose primary is this server."""
        return [key for key, owner in enumerate(self.owners) if owner[0] == server]

    # Messages

    def send(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> int:
        """Queue a message to a server in :attr:`parcels`. If the server is not in the view, drop the message.

        The driver may delay a small push, and send it together with later pushes.

        Args:
            server: Id of the server.
            kind: Kind of the message.
            payload: Bytes after the header and the JSON object.
            **fields: Header fields. The field `json` is a dictionary, which is sent as the JSON object.

        Returns:
            Number of bytes of the message; 0 if the message is dropped.
        """
        if server not in self._servers:
            return 0
        self.sequence += 1
        session = self._specification.session
        header, payload = compose(
            self._id, session, kind, self.sequence, payload, incarnation=self._incarnation, **fields
        )  # fmt: skip
        self.parcels.append(Parcel(server, header, payload, kind == Kind.PUSH))
        return HEADER_BYTES + len(payload)

    def take(self) -> list[Parcel]:
        """Return the queued messages, and clear :attr:`parcels`."""
        parcels, self.parcels = self.parcels, []
        return parcels

    def heard(self, now: float, server: int, header: Header) -> bool:
        """Record the arrival of a server's message. Return whether the caller must handle the message.

        The caller must drop a repeated message, a message that is older than the server's last message, and a message
        whose header does not name this server as the sender.
        """
        if header.sender != SERVER + server or header.sequence <= self._last.get(server, 0):
            return False
        self._last[server] = header.sequence
        self.liveness.pass_to(now)
        self.liveness.hear(server)
        self._received[server] = self._received.get(server, (now, now))[0], now
        if header.kind == Kind.PULLED:
            self._probed[server] = self.liveness.now
        return True

    # Silence of servers

    def begin_waiting(self, now: float) -> None:
        """Count the silence of all servers from now on, because this worker reads messages only while it waits."""
        self.liveness.listen(now)
        self._probed = dict(self.liveness.heard)

    def unanswering(self) -> list[int]:
        """Return the ids of the servers that the caller must probe now, and record the time of these probes.

        For `PROBE_SECONDS`, these servers have not replied to a pull and were not probed.
        """
        now, seconds = self.liveness.now, min(PROBE_SECONDS, self._specification.timeout / 8)
        late = [server for server in self._servers if now - self._probed.setdefault(server, now) >= seconds]
        self._probed.update(dict.fromkeys(late, now))
        return late

    def check_deaf(self, server: int, deaf: Collection[int]) -> None:
        """Raise an error if two servers cannot reach each other, although this worker receives messages from both.

        No error is raised for a server from which this worker also receives nothing. Such a server may be dead, and
        the coordinator then removes it. No error is raised either for a server from which this worker received its
        first message only a short time ago. A process registers before it can serve, so until then it may still have
        been starting, and may have sent nothing to the other servers.

        Args:
            server: Id of the server that reports silent servers.
            deaf: Ids of the silent servers, from which the reporting server has received nothing for some time.

        Raises:
            ServersUnreachableError: The connection between two live servers is broken.
        """
        now = self._received[server][1]  # The report has just arrived.
        since, serving_since = now - self._specification.timeout, now - self._specification.deaf_after
        times = {int(other): self._received[int(other)] for other in deaf if int(other) in self._received}
        alive = sorted(other for other, (first, last) in times.items() if last > since and first < serving_since)
        if alive:
            raise ServersUnreachableError(
                f"server {server} has heard nothing from server {', '.join(map(str, alive))} for "
                f"{self._specification.deaf_after:g} s, although worker {self._id} hears both: check the network "
                "between the machines of these servers"
            )

    def check(self, trains: bool) -> None:
        """Raise an error if a server has been silent, or a slice has had no primary, for longer than the time-out.

        The time-out is the specification's `patience`.

        Args:
            trains: Whether this worker takes part in steps. Otherwise a slice without a primary is not an error.

        Raises:
            ServersUnreachableError: A server is silent, or slices are lost.
        """
        limit = self._patience
        if silent := self.liveness.silent(limit):
            names = ", ".join(f"{server} ({self._servers[server].endpoint})" for server in silent)
            raise ServersUnreachableError(
                f"worker {self._id} had no answer from server {names} for {limit} s: look at the server's log, or "
                "raise timeout"
            )
        orphans = len(self.of(-1)) if trains else 0
        if self._has_orphans.seconds(self.liveness.now, orphans > 0) > limit and orphans:
            raise ServersUnreachableError(
                f"server {', '.join(map(str, sorted(self._missing)))} died and was not replaced within {limit} s, so "
                f"{orphans} slices of the parameters are lost: use replication=2"
            )

    def lost(self, server: int) -> None:
        """Raise the error for a server that was started again and has lost the values of its slices.

        Raises:
            ServersUnreachableError: Always.
        """
        raise ServersUnreachableError(
            f"server {server} was started again, but its slices of the parameters are lost: use replication=2, so "
            "that a run can continue after a server's death"
        )
