"""Agreement of the servers on a common step: whose pushes are complete, and which workers make up the step."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.server.store import MemberKey
from cnnstrategies.paramserver.specification import Options, Specification, check_options


@dataclass(frozen=True)
class Decision:
    """The members that make up a step, its hyper-parameters, and the factor that clips its gradient.

    A worker that takes a dead member's place has the same id and another incarnation: its push does not count for this
    step.

    Attributes:
        step: Number of the step.
        members: The members whose gradients make up the step.
        options: Hyper-parameters of the step.
        scale: Factor for clipping by the global norm; None while it is not known.
    """

    step: int
    members: tuple[MemberKey, ...]
    options: Options
    scale: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return this decision as a dictionary that JSON can hold."""
        return {"step": self.step, "who": self.members, "options": self.options, "scale": self.scale}

    @classmethod
    def from_message(cls, message: Message, specification: Specification) -> "Decision":
        """Return the decision that another server has sent.

        Raises:
            InvalidMessageError: The decision waits for a factor although nothing is clipped.
            ControlError: A field is missing or has the wrong type.
        """
        members = tuple((worker, incarnation) for worker, incarnation in message.table("who", int, int))
        scale = None if message.fields.get("scale") is None else message.real("scale")
        if scale is None and specification.clip_norm is None:
            raise InvalidMessageError("a step that waits for a factor although nothing is clipped")
        options = check_options(message.fields.get("options"), specification.groups)
        return cls(message.integer("step"), members, options, scale)


Entry = tuple[int, int]
"""A step, and the id of a worker whose pushes of that step a server has completely."""


class Reports:
    """The servers' reports under the present view, counted as they arrive.

    A report costs the same for any number of workers.

    Args:
        alone: Whether the report of one server is enough.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._servers = 0
        self._silent: set[int] = set()  # servers without a report
        self._servers_by_entry: dict[Entry, set[int]] = {}
        self._complete: dict[int, set[int]] = {}

    def follow(self, servers: Collection[int]) -> None:
        """Follow another view: every server of the view has to report again."""
        self._servers = len(servers)
        self._silent = set(servers)
        self._servers_by_entry.clear()
        self._complete.clear()

    def add(self, server: int, complete: Collection[Entry]) -> None:
        """Note which entries a server of the view has completely."""
        self._silent.discard(server)
        for step, worker in complete:
            servers = self._servers_by_entry.setdefault((step, worker), set())
            servers.add(server)
            if self._alone or len(servers) == self._servers:
                self._complete.setdefault(step, set()).add(worker)

    def complete(self, step: int) -> Set[int] | None:
        """Return the workers whose pushes of a step all servers have; None if a server has not reported yet."""
        return None if self._silent else self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop the reports on earlier steps."""
        self._servers_by_entry = {
            entry: servers for entry, servers in self._servers_by_entry.items() if entry[0] >= step
        }
        self._complete = {key: workers for key, workers in self._complete.items() if key >= step}
