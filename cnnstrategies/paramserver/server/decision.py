"""What the servers agree on about a common step: who has pushed it all, and who makes it up."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.server.store import Who
from cnnstrategies.paramserver.specification import Options, Specification, check_options


@dataclass(frozen=True)
class Decision:
    """Who makes up a step, with which hyper-parameters, and the factor that clips it once it is known.

    One that takes a dead member's place has its number and another life: its push of this step will not come.
    """

    step: int
    who: tuple[Who, ...]
    options: Options
    scale: float | None

    def as_dict(self) -> dict[str, Any]:
        """This decision as what JSON can hold."""
        return dict(vars(self))  # Not `asdict`, which would copy the hyper-parameters at each step.

    @classmethod
    def of(cls, said: Message, specification: Specification) -> "Decision":
        """The one that another server tells."""
        who = tuple((worker, incarnation) for worker, incarnation in said.table("who", int, int))
        scale = None if said.fields.get("scale") is None else said.real("scale")
        if scale is None and specification.clip_norm is None:
            raise InvalidMessageError("a step that waits for a factor although nothing is clipped")
        options = check_options(said.fields.get("options"), specification.groups)
        return cls(said.integer("step"), who, options, scale)


Entry = tuple[int, int]
"""A step, and a worker whose pushes of it a server has in full."""


class Reports:
    """What the servers report under the present view, counted as it comes: at the same cost for any number of workers.

    Args:
        alone: Whether what one server has is enough.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._servers = 0
        self._silent: set[int] = set()  # servers that have not reported yet
        self._having: dict[Entry, set[int]] = {}  # servers
        self._complete: dict[int, set[int]] = {}

    def follow(self, servers: Collection[int]) -> None:
        """Go on with another view's servers: every one of them reports anew."""
        self._servers = len(servers)
        self._silent = set(servers)
        self._having.clear()
        self._complete.clear()

    def add(self, server: int, complete: Collection[Entry]) -> None:
        """Note what a server of the view has in full."""
        self._silent.discard(server)
        for step, worker in complete:
            having = self._having.setdefault((step, worker), set())
            having.add(server)
            if self._alone or len(having) == self._servers:
                self._complete.setdefault(step, set()).add(worker)

    def complete(self, step: int) -> Set[int] | None:
        """The workers whose pushes of a step all servers have; None if a server has not reported yet."""
        return None if self._silent else self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop what was said about earlier steps."""
        self._having = {entry: servers for entry, servers in self._having.items() if entry[0] >= step}
        self._complete = {one: workers for one, workers in self._complete.items() if one >= step}
