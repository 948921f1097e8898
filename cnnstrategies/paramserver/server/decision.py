"""Agreement of the servers on a common step: the servers' reports to the leader, and the leader's decision."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.server.store import MemberKey
from cnnstrategies.paramserver.specification import Options, Specification, check_options


@dataclass(frozen=True)
class Decision:
    """The leader's decision about a step, which the leader sends to all servers.

    Attributes:
        step: Number of the step.
        members: Ids and incarnations of the workers whose gradients make up the step. A process that replaces a dead
            member has a different incarnation, so the pushes of the new process do not count for this step.
        options: Hyperparameters of the step.
        scale: Clipping factor. The mean gradient is multiplied by it, so that the global norm is at most `clip_norm`.
            None as long as the norm is not known; 1 in a run without clipping by norm.
    """

    step: int
    members: tuple[MemberKey, ...]
    options: Options
    scale: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return this decision as a dictionary that JSON can represent."""
        return {"step": self.step, "who": self.members, "options": self.options, "scale": self.scale}

    @classmethod
    def from_message(cls, message: Message, specification: Specification) -> "Decision":
        """Return the decision in a message from another server.

        Raises:
            InvalidMessageError: The decision has no clipping factor, although the run does not clip by norm and the
                factor must therefore be 1.
            ControlError: A field is missing or has the wrong type.
        """
        members = tuple((worker, incarnation) for worker, incarnation in message.table("who", int, int))
        scale = None if message.fields.get("scale") is None else message.real("scale")
        if scale is None and specification.clip_norm is None:
            raise InvalidMessageError(
                "the decision has no clipping factor; in a run that does not clip by norm, the factor must be 1"
            )
        options = check_options(message.fields.get("options"), specification.groups)
        return cls(message.integer("step"), members, options, scale)


Entry = tuple[int, int]
"""A step and the id of a worker whose pushes of this step are complete on the server that reports the entry."""


class Reports:
    """The servers' reports to the leader about the workers whose pushes are complete, under the current view.

    The time to add a report depends only on the length of the report, and not on the number of workers.

    Args:
        alone: Whether one server's report about a worker is enough. This is so for pipelined steps, in which only the
            leader reports workers. Otherwise every server must report the worker.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._servers = 0  # number of servers in the view
        self._silent: set[int] = set()  # ids of the servers that have not reported under this view
        # By step and worker: ids of the servers that have reported the worker's pushes of the step as complete.
        self._servers_by_entry: dict[Entry, set[int]] = {}
        # By step: ids of the workers whose pushes of the step have arrived at all servers.
        self._complete: dict[int, set[int]] = {}

    def follow(self, servers: Collection[int]) -> None:
        """Drop all reports because the view has changed. Every server must report again.

        Args:
            servers: Ids of the servers of the new view.
        """
        self._servers = len(servers)
        self._silent = set(servers)
        self._servers_by_entry.clear()
        self._complete.clear()

    def add(self, server: int, complete: Collection[Entry]) -> None:
        """Add a server's report.

        Args:
            server: Id of the server, which must be in the view.
            complete: Pairs of a step and the id of a worker whose pushes of this step are now complete on the server.
        """
        self._silent.discard(server)
        for step, worker in complete:
            servers = self._servers_by_entry.setdefault((step, worker), set())
            servers.add(server)
            if self._alone or len(servers) == self._servers:
                self._complete.setdefault(step, set()).add(worker)

    def complete(self, step: int) -> Set[int] | None:
        """Return the ids of the workers whose pushes of a step have arrived at all servers.

        Return None as long as a server of the current view has not sent a report under this view.
        """
        return None if self._silent else self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop the reports about all steps with a number below `step`."""
        self._servers_by_entry = {
            entry: servers for entry, servers in self._servers_by_entry.items() if entry[0] >= step
        }
        self._complete = {key: workers for key, workers in self._complete.items() if key >= step}
