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
        who = tuple((worker, life) for worker, life in said.table("who", int, int))
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
        self._reports: dict[int, set[Entry]] = {}
        self._servers: frozenset[int] = frozenset()
        self._counts: dict[Entry, int] = {}
        self._complete: dict[int, set[int]] = {}

    def follow(self, servers: Collection[int]) -> None:
        """Go on with another view's servers: every one of them reports anew."""
        self._servers = frozenset(servers)
        for kept in (self._reports, self._counts, self._complete):
            kept.clear()

    def add(self, server: int, complete: Collection[Entry]) -> None:
        """Note what a server of the view has in full."""
        known = self._reports.setdefault(server, set())
        for entry in set(complete) - known:
            count = self._counts[entry] = self._counts.get(entry, 0) + 1
            if count == (1 if self._alone else len(self._servers)):
                self._complete.setdefault(entry[0], set()).add(entry[1])
        known.update(complete)

    def complete(self, step: int) -> Set[int] | None:
        """The workers whose pushes of a step all servers have; None if a server has not reported yet."""
        if not self._reports.keys() >= self._servers:
            return None
        return self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop what was said about earlier steps."""
        for reported in self._reports.values():
            reported.difference_update([entry for entry in reported if entry[0] < step])
        self._counts = {entry: count for entry, count in self._counts.items() if entry[0] >= step}
        self._complete = {one: workers for one, workers in self._complete.items() if one >= step}
