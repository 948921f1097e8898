"""Views (numbered lists of a run's members), the interface of a source of views, and errors that end a process."""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from cnnstrategies.paramserver.core.node import Message

# Beginning of an error message that ends with the class and the message of the exception that has ended the run.
_FAILED = re.compile(r"^(the coordinator failed|(?:server|worker) \d+ failed): ")


@dataclass(frozen=True)
class ServerInfo:
    """A server's entry in a view.

    Attributes:
        id: Number of the server, from 0 to `Specification.servers` - 1. A process that replaces the server gets the
            same id.
        endpoint: Address of the server's ROUTER socket, such as ``tcp://10.0.0.1:4000``.
        public_key: The server's public CURVE key, in Z85 form; empty without encryption.
        since: Number of the first view that contains this process. The server with the lowest number is the oldest (see
            :meth:`View.age`). Of the servers that hold a slice, the oldest is the primary, because younger servers may
            not have the slice's values yet.
    """

    id: int
    endpoint: str
    public_key: str = ""
    since: int = 0


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's entry in a view.

    Attributes:
        id: Number of the worker. A process that replaces the worker gets the same id.
        incarnation: Number of earlier processes with this id.
        public_key: The worker's public CURVE key, in Z85 form; empty without encryption.
    """

    id: int
    incarnation: int = 0
    public_key: str = ""


@dataclass(frozen=True)
class View:
    """A numbered list of the run's members: the live servers and workers.

    Attributes:
        number: Number of the view; each new view has the next number. Processes ignore views that are older than the
            view that they already have.
        servers: The live servers, in the order of their ids.
        workers: The live workers, in the order of their ids; empty before training begins.
        lost: Ids of the dead servers, if live servers hold all their slices; otherwise empty.
        begun: Number of the view with which training began; 0 before training begins. All servers of that view count
            as equally old, because none of them held values earlier. If the run's specification changes, this is the
            number of the first view with the new specification, with which the servers begin without values.
        specification: Number of the run's specification, which is above 0 after parameters were added to the optimizer.
    """

    number: int
    servers: tuple[ServerInfo, ...]
    workers: tuple[WorkerInfo, ...]
    lost: tuple[int, ...] = ()
    begun: int = 0
    specification: int = 0

    def age(self, server: ServerInfo) -> int:
        """Return the number of the first view in which a server may hold values.

        The oldest server has the lowest number.
        """
        return max(server.since, self.begun)

    @property
    def incarnations(self) -> dict[int, int]:
        """Incarnation of each worker in this view, by worker id."""
        return {worker.id: worker.incarnation for worker in self.workers}

    def as_dict(self) -> dict[str, Any]:
        """Return this view as a dictionary that JSON can represent."""
        rows = {name: [list(astuple(entry)) for entry in getattr(self, name)] for name in ("servers", "workers")}
        numbers = {"number": self.number, "begun": self.begun, "specification": self.specification}
        return {**numbers, **rows, "lost": list(self.lost)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "View":
        """Return the view from a dictionary that :meth:`as_dict` returned.

        Raises:
            ControlError: A field is missing or has the wrong type.
        """
        view = Message("view", values)
        servers = tuple(ServerInfo(*row) for row in view.table("servers", int, str, str, int))
        workers = tuple(WorkerInfo(*row) for row in view.table("workers", int, int, str))
        number, begun, specification = (view.integer(name) for name in ("number", "begun", "specification"))
        return cls(number, servers, workers, tuple(view.integers("lost")), begun, specification)


class RunEnded(RuntimeError):  # noqa: N818 - a planned end is not an error
    """End of the run: the run is over or cannot go on.

    Args:
        message: Error message for the user. It gives the reason, and names the processes that died.
        clean: Whether the run ended as planned.
        stranger: Whether this process does not belong to the run, which goes on without it.
    """

    def __init__(self, message: str, clean: bool = False, stranger: bool = False) -> None:
        super().__init__(message)
        self.clean = clean
        self.stranger = stranger

    @property
    def lines(self) -> list[str]:
        """The error message as lines. If a process has failed, its exception is the last line, as in a traceback."""
        return _FAILED.sub("\\1\n", str(self)).split("\n")


class ViewSource(Protocol):
    """Source from which a worker or server gets its views. Only one thread may use it.

    :meth:`current` and :meth:`wait_newer` raise :class:`RunEnded` once the run is over.
    """

    def current(self) -> View:
        """Return the newest view that this process has received, without waiting."""

    def wait_newer(self, number: int, timeout: float) -> View:
        """Wait until a view with a number above `number` has arrived, and return the newest view.

        Args:
            number: Number of the newest view that the caller has; -1 if the caller has no view.
            timeout: Longest time to wait, in seconds.

        Raises:
            TimeoutError: No newer view arrived within the timeout.
        """

    def fileno(self) -> int:
        """Return a file descriptor that is readable if :meth:`current` would return a new view or raise an error."""


class ServersUnreachableError(RuntimeError):
    """Error of a worker whose servers do not reply, cannot reach each other, or have lost slices."""


class RemovedError(RuntimeError):
    """Error of a worker that is no longer in the view: the coordinator counted it as dead after a long silence.

    The process must join again, as a new incarnation.
    """
