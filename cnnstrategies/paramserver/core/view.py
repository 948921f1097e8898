"""Who takes part: numbered views of the membership, where a process gets them from, and why it cannot go on."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from cnnstrategies.paramserver.core.node import Message


@dataclass(frozen=True)
class ServerInfo:
    """A server process.

    Attributes:
        id: Its place, 0 to `Specification.servers` - 1; a process that replaces another has the same one.
        endpoint: Where its ROUTER socket is bound, such as ``tcp://10.0.0.1:4000``.
        public_key: Its CURVE key in Z85 form; empty without encryption.
        since: Number of the first view with this process. Of two copies of a slice the older process has the state.
    """

    id: int
    endpoint: str
    public_key: str = ""
    since: int = 0


@dataclass(frozen=True)
class WorkerInfo:
    """A worker process.

    Attributes:
        id: Its number; a process that replaces another may have the same one.
        incarnation: How many processes had this id before it.
        public_key: Its CURVE key in Z85 form; empty without encryption.
    """

    id: int
    incarnation: int = 0
    public_key: str = ""


@dataclass(frozen=True)
class View:
    """The live servers and workers.

    Attributes:
        number: Grows by one with every change; a process that has seen a view ignores older ones.
        servers: The live servers, by id.
        workers: The live workers, by id.
        lost: Ids of the servers that have died and that copies of their slices stand in for.
        begun: Number of the first view of training; 0 before. The servers of that view are equally old: none of them
            had state then.
    """

    number: int
    servers: tuple[ServerInfo, ...]
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...] = ()
    begun: int = 0

    def age(self, server: ServerInfo) -> int:
        """Number of the view since which one of its servers has had state, or its place."""
        return max(server.since, self.begun)

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnation of each worker."""
        return {worker.id: worker.incarnation for worker in self.workers}

    def as_dict(self) -> dict[str, Any]:
        """This view as what JSON can hold."""
        rows = {name: [list(astuple(one)) for one in getattr(self, name)] for name in ("servers", "workers")}
        return {"number": self.number, **rows, "lost": list(self.lost), "begun": self.begun}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "View":
        """The view that :meth:`as_dict` described."""
        said = Message("view", values)
        servers = tuple(ServerInfo(*row) for row in said.table("servers", int, str, str, int))
        workers = tuple(WorkerInfo(*row) for row in said.table("workers", int, int, str))
        return cls(said.integer("number"), servers, workers, tuple(said.integers("lost")), said.integer("begun"))


class RunEnded(RuntimeError):  # noqa: N818 - an end, not always an error
    """The run is over, or cannot go on; the message says why and names who died.

    Args:
        message: What to tell the user.
        clean: Whether the run ended as planned.
    """

    def __init__(self, message: str, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


class ViewSource(Protocol):
    """Where a worker or a server learns of the membership. Used by one thread.

    All methods raise :class:`RunEnded` once the run is over; workers and servers let it through.
    """

    def current(self) -> View:
        """The newest view known here; does not block."""

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number.

        Args:
            number: The last view that the caller has seen; -1 for none.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: None came.
        """

    def fileno(self) -> int:
        """A file descriptor that is readable while :meth:`current` would return a view not yet returned."""


class ServersUnreachableError(RuntimeError):
    """Servers did not answer within the time-out, or slices are lost; the message names the servers."""


class RemovedError(RuntimeError):
    """This worker is no longer in the view (it was taken for dead): it must join again as a new incarnation."""
