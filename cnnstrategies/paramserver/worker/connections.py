"""A worker's connections to the servers: who has which slice, what is sent and counted, and who is alive."""

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
    """What a worker has sent, received and waited since it was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulls, headers included.
        seconds_waited: Time in a worker's ``wait`` and ``wait_all``.
        steps: Steps finished, or left out to catch up.
        samples: That the pushed gradients are means of.
        staleness: Updates that others made between the values that this worker has computed with and its own update,
            as its first slice has seen them.
        dropped: Steps that were made without this worker's node, which it left out to catch up.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0
    samples: float = 0.0
    staleness: int = 0
    dropped: int = 0

    def figures(self) -> dict[str, float]:
        """The same, under the names that the coordinator takes."""
        return {
            "step": self.steps,
            "samples": self.samples,
            "sent": self.bytes_sent,
            "received": self.bytes_received,
            "waited": self.seconds_waited,
            "staleness": self.staleness,
        }


class Connections:
    """Numbers what is sent to servers, and notes when each was heard.

    Attributes:
        owners: The primary of each slice, and since which view it is there; no primary (-1) before the first view.
        sequence: Number of the last message sent.
        parcels: What is to be sent.
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
        self._heard: dict[int, float] = {}  # when each server was, or since when its silence counts
        self._came: dict[int, float] = {}  # when its last message did
        self._probed: dict[int, float] = {}
        self._orphaned_since: float | None = None
        self._meets_until = 0.0
        self._was_member = False

    # Membership

    def begin_meeting(self, now: float) -> None:
        """From now on :meth:`met` waits, not for ever."""
        self._meets_until = now + self._specification.timeout

    def met(self, now: float) -> bool:
        """Whether this worker and all servers are in the view, but those that have died already.

        Raises:
            ServersUnreachableError: They did not come in time.
        """
        missing = self._missing - {*self.view.lost}
        if not missing and self._is_member():
            self._was_member = True
            return True
        if now > self._meets_until:
            who = f"servers {sorted(missing)}" if missing else f"worker {self._id} itself"
            raise ServersUnreachableError(
                f"worker {self._id}: {who} did not join within {self._specification.timeout} s: look at their "
                "logs, or raise timeout"
            )
        return False

    @property
    def _missing(self) -> set[int]:
        return set(range(self._specification.servers)) - {server.id for server in self.view.servers}

    def _is_member(self) -> bool:
        return any((worker.id, worker.incarnation) == (self._id, self._incarnation) for worker in self.view.workers)

    def follow(self, now: float, view: View) -> bool:
        """Take over a newer view; whether its servers are others.

        Raises:
            RemovedError: This worker is not in it.
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
            self._came.pop(server, None)
        self.parcels = [parcel for parcel in self.parcels if parcel.to not in gone]
        return before != self._servers

    # Slices

    def place(self) -> list[int]:
        """Find the slices' primaries in the view: those that are now another server's, or another process's of it."""
        since = {server.id: server.since for server in self.view.servers}
        before = self.owners
        primaries = [next(iter(holders(slice_, self.view)), -1) for slice_ in self._slices]
        self.owners = [(primary, since.get(primary, 0)) for primary in primaries]
        return [key for key, owner in enumerate(self.owners) if owner != before[key]]

    def primary(self, key: int) -> int:
        """A slice's primary; -1 if it has none."""
        return self.owners[key][0]

    def of(self, server: int) -> list[int]:
        """The slices that a server is the primary of."""
        return [key for key, owner in enumerate(self.owners) if owner[0] == server]

    # Messages

    def send(self, server: int, kind: Kind, payload: Any = b"", **fields: Any) -> int:
        """Send a message, which begins with a JSON object if one is given; nothing if the server is not in the view.

        Small pushes may wait for each other. Returns how many bytes.
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
        """What is to be sent; it is not kept."""
        parcels, self.parcels = self.parcels, []
        return parcels

    def heard(self, now: float, server: int, header: Header) -> bool:
        """Note that a message has come; whether it is to be acted on."""
        if header.sender != SERVER + server or header.sequence <= self._last.get(server, 0):
            return False
        self._last[server] = header.sequence
        self._heard[server] = self._came[server] = now
        if header.kind == Kind.PULLED:
            self._probed[server] = now
        return True

    # Who is alive

    def begin_waiting(self, now: float) -> None:
        """From now on silence counts."""
        self._heard = dict.fromkeys(self._servers, now)
        self._probed = dict.fromkeys(self._servers, now)

    def stopped(self, now: float, seconds: float) -> None:
        """This process was stopped for some seconds, up to now: nobody was silent meanwhile."""
        for times in (self._heard, self._probed):
            times.update({server: min(time + seconds, now) for server, time in times.items()})
        self._meets_until += seconds
        if self._orphaned_since is not None:
            self._orphaned_since = min(self._orphaned_since + seconds, now)

    def unanswering(self, now: float, seconds: float) -> list[int]:
        """The servers that have answered no request, and not been asked, for some seconds; they count as asked now."""
        asked = [server for server in self._servers if now - self._probed.setdefault(server, now) >= seconds]
        self._probed.update(dict.fromkeys(asked, now))
        return asked

    def check_deaf(self, now: float, server: int, deaf: Collection[int]) -> None:
        """Give up if a server hears nothing from others although they are there.

        One that is silent here too may be dead, and nobody has noticed it yet.

        Raises:
            ServersUnreachableError: It does.
        """
        since = now - self._specification.timeout
        others = {int(other) for other in deaf} & self._servers.keys()
        there = sorted(other for other in others if self._came.get(other, -inf) > since)
        if there:
            raise ServersUnreachableError(
                f"server {server} has heard nothing from server {', '.join(map(str, there))} for "
                f"{self._specification.deaf_after:g} s, and worker {self._id} hears both: look at the "
                "connection between their machines"
            )

    def check(self, now: float, trains: bool) -> None:
        """Give up if a server has not answered for the time-out, or slices of one that trains had none for so long.

        Raises:
            ServersUnreachableError: One of them is the case.
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
        """A server was replaced by one that has no values.

        Raises:
            ServersUnreachableError: Always.
        """
        raise ServersUnreachableError(
            f"server {server} was started again, but its slices of the parameters are lost: use replication=2 to go "
            "on after a server's death"
        )
