"""Membership: numbered views, where a process gets them, and the reasons why a process cannot go on."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from cnnstrategies.paramserver.core.node import Message


@dataclass(frozen=True)
class ServerInfo:
    """A server process.

    Attributes:
        id: Number of its place, 0 to `Specification.servers` - 1; a process that replaces another one has the same id.
        endpoint: Where its ROUTER socket is bound, such as ``tcp://10.0.0.1:4000``.
        public_key: Its CURVE key in Z85 form; empty without encryption.
        since: Number of the first view with this process. Of two copies of a slice the older process's copy has the
            state.
    """

    id: int
    endpoint: str
    public_key: str = ""
    since: int = 0


@dataclass(frozen=True)
class WorkerInfo:
    """A worker process.

    Attributes:
        id: Its number; a process that replaces another one may have the same number.
        incarnation: Number of processes that had this id before.
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
        lost: Ids of the dead servers whose slices have copies on live servers.
        begun: Number of the first view of training; 0 before. The servers of that view are equally old: none of them
            had state then.
    """

    number: int
    servers: tuple[ServerInfo, ...]
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...] = ()
    begun: int = 0

    def age(self, server: ServerInfo) -> int:
        """Return the number of the view since which a server may have state; a lower number means an older server."""
        return max(server.since, self.begun)

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnation of each worker, by id."""
        return {worker.id: worker.incarnation for worker in self.workers}

    def as_dict(self) -> dict[str, Any]:
        """Return this view as a dictionary that JSON can hold."""
        rows = {name: [list(astuple(entry)) for entry in getattr(self, name)] for name in ("servers", "workers")}
        return {"number": self.number, **rows, "lost": list(self.lost), "begun": self.begun}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "View":
        """Return the view that :meth:`as_dict` described.

        Raises:
            ControlError: A field is missing or has the wrong type.
        """
        view = Message("view", values)
        servers = tuple(ServerInfo(*row) for row in view.table("servers", int, str, str, int))
        workers = tuple(WorkerInfo(*row) for row in view.table("workers", int, int, str))
        return cls(view.integer("number"), servers, workers, tuple(view.integers("lost")), view.integer("begun"))


class RunEnded(RuntimeError):  # noqa: N818 - an end, not always an error
    """End of a run that is over or cannot go on; the message gives the reason and names the processes that died.

    Args:
        message: Text for the user.
        clean: Whether the run ended as planned.
    """

    def __init__(self, message: str, clean: bool = False) -> None:
        super().__init__(message)
        self.clean = clean


class ViewSource(Protocol):
    """A worker's or server's source of views, used by one thread.

    All methods raise :class:`RunEnded` once the run is over; workers and servers pass the error on.
    """

    def current(self) -> View:
        """Return the newest view known here, without waiting."""

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait for a view with a higher number.

        Args:
            number: Number of the last view that the caller has seen; -1 for none.
            timeout: Seconds to wait.

        Raises:
            TimeoutError: No newer view arrived in time.
        """

    def fileno(self) -> int:
        """Return a file descriptor that is readable while :meth:`current` would return a view not yet returned."""


class ServersUnreachableError(RuntimeError):
    """Missing answers of servers within the time-out, or lost slices; the message names the servers."""


class RemovedError(RuntimeError):
    """Removal of this worker from the view, because it was taken for dead; it must join again as a new incarnation."""
