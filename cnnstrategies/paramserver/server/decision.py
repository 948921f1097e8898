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
    members: tuple[int, ...]
    lives: tuple[int, ...]
    options: Options
    scale: float | None

    @property
    def who(self) -> list[Who]:
        """The members with their lives."""
        return list(zip(self.members, self.lives, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """This decision as what JSON can hold."""
        return dict(vars(self))  # Not `asdict`, which would copy the hyper-parameters at each step.

    @classmethod
    def of(cls, said: Message, specification: Specification) -> "Decision":
        """The one that another server tells."""
        members, lives = (tuple(said.integers(name)) for name in ("members", "lives"))
        if len(lives) != len(members):
            raise InvalidMessageError("members without a life")
        scale = None if said.fields.get("scale") is None else said.real("scale")
        if scale is None and specification.clip_norm is None:
            raise InvalidMessageError("a step that waits for a factor although nothing is clipped")
        options = check_options(said.fields.get("options"), specification.groups)
        return cls(said.integer("step"), members, lives, options, scale)


VIEWS_AHEAD = 16  # reports are kept for so many views that this server has not seen yet
Entry = tuple[int, int]
"""A step, and a worker whose pushes of it a server has in full."""


class Reports:
    """The servers' reports under the present view, and under those that are to come.

    Those under the present view are counted as they come: a report costs the same for any number of workers.

    Args:
        alone: Whether what one server has is enough.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        self._view = -1
        self._servers: frozenset[int] = frozenset()
        self._reports: dict[int, dict[int, set[Entry]]] = {}
        self._counts: dict[Entry, int] = {}
        self._complete: dict[int, set[int]] = {}

    def follow(self, view: int, servers: Collection[int]) -> None:
        """Go on with another view and its servers: every one of them reports anew."""
        self._view = view
        self._servers = frozenset(servers)
        self._counts.clear()
        self._complete.clear()
        early = self._reports.pop(view, {})
        self._reports = {number: reports for number, reports in self._reports.items() if number > view}
        for server, complete in early.items():
            self.add(server, view, complete)

    def add(self, server: int, view: int, complete: Collection[Entry]) -> None:
        """Note what a server has in full, as it says under a view."""
        if not self._view <= view <= self._view + VIEWS_AHEAD:
            return
        known = self._reports.setdefault(view, {}).setdefault(server, set())
        new = set(complete) - known
        known |= new
        if view == self._view and server in self._servers:
            for entry in new:
                count = self._counts[entry] = self._counts.get(entry, 0) + 1
                if count == (1 if self._alone else len(self._servers)):
                    self._complete.setdefault(entry[0], set()).add(entry[1])

    def complete(self, step: int) -> Set[int] | None:
        """The workers whose pushes of a step all servers have; None if a server has not reported yet."""
        if not self._reports.get(self._view, {}).keys() >= self._servers:
            return None
        return self._complete.get(step, frozenset())

    def forget_before(self, step: int) -> None:
        """Drop what was said about earlier steps."""
        for reports in self._reports.values():
            for complete in reports.values():
                complete.difference_update([entry for entry in complete if entry[0] < step])
        for entry in [entry for entry in self._counts if entry[0] < step]:
            del self._counts[entry]
        for old in [old for old in self._complete if old < step]:
            del self._complete[old]
