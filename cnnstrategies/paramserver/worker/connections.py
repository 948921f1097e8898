"""A worker's connections to the servers: primaries of the slices, numbered messages, counters, and live servers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from cnnstrategies.paramserver.core.view import RemovedError, ServerInfo, ServersUnreachableError, View
from cnnstrategies.paramserver.messages import HEADER_BYTES, SERVER, Header, Kind, Parcel, compose
from cnnstrategies.paramserver.slicing import Slice, holders
from cnnstrategies.paramserver.specification import Specification


@dataclass
class Counters:
    """A worker's traffic, steps and waiting times since the worker was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulled payloads.
        seconds_waited: Time in a worker's ``wait`` and ``wait_all``.
        steps: Steps finished, or skipped to catch up.
        samples: Number of samples of which the pushed gradients are means.
        staleness: Updates of other workers between the values with which this worker computed and its own update,
            summed over the steps and counted at the first slice.
        dropped: Steps that were made without this worker's node, and that this worker skipped to catch up.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0
    samples: float = 0.0
    staleness: int = 0
    dropped: int = 0

    def figures(self) -> dict[str, float]:
        """Return the counters under the names that the coordinator uses."""
        return {
            "step": self.steps,
            "samples": self.samples,
            "sent": self.bytes_sent,
            "received": self.bytes_received,
            "waited": self.seconds_waited,
            "staleness": self.staleness,
        }


class Connections:
    """Connections to the servers of the present view, with the messages to send and the times of received messages.

    Attributes:
        view: The present view.
        owners: By key, the slice's primary and the view with which the primary's process came; the primary is -1
            before the first view and for a slice without live servers.
        sequence: Number of the last message sent.
        parcels: Messages to send.
    """

    def __init__(self, specification: Specification, slices: Sequence[Slice], id: int, incarnation: int) -> None:
        self.view = View(-1, (), ())
        self.owners: list[tuple[int, int]] = [(-1, 0)] * len(slices)
        self.sequence = 0
        self.parcels: list[Parcel] = []
        self._specification = specification
        self._slices = slices
        self._id = id
        self._incarnation = incarnation
        self._servers: dict[int, ServerInfo] = {}
        self._last: dict[int, int] = {}
        # Times in seconds, by server.
        self._heard: dict[int, float] = {}  # of the last message, or the time since when the server's silence counts
        self._received: dict[int, float] = {}  # of the last message
        self._probed: dict[int, float] = {}  # of the last probe or pull's answer
        self._orphaned_since: float | None = None  # since when slices have not had a primary
        self._meet_deadline = 0.0
        self._was_member = False

    # Membership

    def begin_meeting(self, now: float) -> None:
        """Set the deadline of :meth:`met`."""
        self._meet_deadline = now + self._specification.timeout

    def met(self, now: float) -> bool:
        """Return whether this worker and all servers are in the view; servers that have died do not count.

        Raises:
            ServersUnreachableError: A member is missing after the time-out.
        """
        missing = self._missing - {*self.view.lost}
        if not missing and self._is_member():
            self._was_member = True
            return True
        if now > self._meet_deadline:
            members = f"servers {sorted(missing)}" if missing else f"worker {self._id} itself"
            raise ServersUnreachableError(
                f"worker {self._id}: {members} did not join within {self._specification.timeout} s: look at their "
                "logs, or raise timeout"
            )
        return False

    @property
    def _missing(self) -> set[int]:
        return set(range(self._specification.servers)) - {server.id for server in self.view.servers}

    def _is_member(self) -> bool:
        return any((worker.id, worker.incarnation) == (self._id, self._incarnation) for worker in self.view.workers)

    def follow(self, now: float, view: View) -> bool:
        """Follow a view if it is newer, and return whether its servers differ from those of the view before.

        Raises:
            RemovedError: This worker is no longer in the view.
        """
        if view.number <= self.view.number:
            return False
        self.view = view
        if self._was_member and not self._is_member():
            raise RemovedError(
                f"worker {self._id} (incarnation {self._incarnation}) is no longer in the view (number {view.number}): "
                "it was taken for dead; start it again as a new incarnation"
            )
        before, self._servers = self._servers, {server.id: server for server in view.servers}
        for server, info in self._servers.items():
            if before.get(server) != info:
                self._heard[server] = now
        gone = {server for server, info in before.items() if self._servers.get(server) != info}
        for server in gone:
            self._last.pop(server, None)
            self._received.pop(server, None)
        self.parcels = [parcel for parcel in self.parcels if parcel.to not in gone]
        return before != self._servers

    # Slices

    def place(self) -> list[int]:
        """Find the slices' primaries in the view; return the keys whose primary is another server or process now."""
        since = {server.id: server.since for server in self.view.servers}
        before = self.owners
        primaries = [next(iter(holders(slice_, self.view)), -1) for slice_ in self._slices]
        self.owners = [(primary, since.get(primary, 0)) for primary in primaries]
        return [key for key, owner in enumerate(self.owners) if owner != before[key]]

    def primary(self, key: int) -> int:
        """Return a slice's primary; -1 if it does not have one."""
        return self.owners[key][0]

    def of(self, server: int) -> list[int]:
        """Return the keys of the slices of which a server is the primary."""
        return [key for key, owner in enumerate(self.owners) if owner[0] == server]

    # Messages

    def send(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> int:
        """Send a message, unless the server is not in the view.

        Small pushes may wait for each other.

        Args:
            server: Id of the server.
            kind: Kind of the message.
            payload: Bytes after the header and the JSON object.
            **fields: Header fields, and `json` for a JSON object before the payload.

        Returns:
            Bytes of the message; 0 if it is not sent.
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
        """Return the messages to send, and forget them."""
        parcels, self.parcels = self.parcels, []
        return parcels

    def heard(self, now: float, server: int, header: Header) -> bool:
        """Note that a message has arrived, and return whether it is new: repeated and old messages are ignored."""
        if header.sender != SERVER + server or header.sequence <= self._last.get(server, 0):
            return False
        self._last[server] = header.sequence
        self._heard[server] = self._received[server] = now
        if header.kind == Kind.PULLED:
            self._probed[server] = now
        return True

    # Live servers

    def begin_waiting(self, now: float) -> None:
        """Begin to count the servers' silence."""
        self._heard = dict.fromkeys(self._servers, now)
        self._probed = dict.fromkeys(self._servers, now)

    def stopped(self, now: float, seconds: float) -> None:
        """Note that this process was stopped for some seconds up to now: they do not count as silence of servers."""
        for times in (self._heard, self._probed):
            times.update({server: min(time + seconds, now) for server, time in times.items()})
        self._meet_deadline += seconds
        if self._orphaned_since is not None:
            self._orphaned_since = min(self._orphaned_since + seconds, now)

    def unanswering(self, now: float, seconds: float) -> list[int]:
        """Return the servers that have neither answered a pull nor been probed for some seconds.

        From now on these servers count as probed.
        """
        silent = [server for server in self._servers if now - self._probed.setdefault(server, now) >= seconds]
        self._probed.update(dict.fromkeys(silent, now))
        return silent

    def check_deaf(self, now: float, server: int, deaf: Collection[int]) -> None:
        """Give up if a server receives nothing from another server from which this worker receives messages.

        A server that is also silent towards this worker may be dead, which the coordinator will notice.

        Args:
            now: The time, in seconds.
            server: The server that reports.
            deaf: Servers from which it receives nothing.

        Raises:
            ServersUnreachableError: The connection between two servers is broken.
        """
        since = now - self._specification.timeout
        others = {int(other) for other in deaf} & self._servers.keys()
        alive = sorted(other for other in others if self._received.get(other, -inf) > since)
        if alive:
            raise ServersUnreachableError(
                f"server {server} has heard nothing from server {', '.join(map(str, alive))} for "
                f"{self._specification.deaf_after:g} s, and worker {self._id} hears both: look at the "
                "connection between their machines"
            )

    def check(self, now: float, trains: bool) -> None:
        """Give up if a server has been silent, or slices have been without a primary, for the time-out.

        Args:
            now: The time, in seconds.
            trains: Whether this worker takes part in steps; slices count only then.

        Raises:
            ServersUnreachableError: A server is silent, or slices are lost.
        """
        limit = self._specification.patience
        dead = [server for server in self._servers if now - self._heard.setdefault(server, now) > limit]
        if dead:
            names = ", ".join(f"{server} ({self._servers[server].endpoint})" for server in dead)
            raise ServersUnreachableError(
                f"worker {self._id} had no answer from server {names} for {limit} s: look at its log, or raise timeout"
            )
        orphans = len(self.of(-1)) if trains else 0
        if not orphans:
            self._orphaned_since = None
        elif self._orphaned_since is None:
            self._orphaned_since = now
        elif now - self._orphaned_since > limit:
            raise ServersUnreachableError(
                f"server {', '.join(map(str, sorted(self._missing)))} died, and {orphans} slices of the parameters "
                f"with it; no other took its place within {limit} s: use replication=2"
            )

    def lost(self, server: int) -> None:
        """Give up because a server was replaced by a process without values.

        Raises:
            ServersUnreachableError: Always.
        """
        raise ServersUnreachableError(
            f"server {server} was started again, but its slices of the parameters are lost: use replication=2 to go "
            "on after a server's death"
        )
