"""Whose pushes the servers have in full, as the leader has been told."""

from collections.abc import Collection, Set

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
        """Note what a server has.

        Args:
            server: The server.
            view: Number of the view under which it says so.
            complete: Steps with workers whose pushes of that step it has in full.
        """
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

    def steps_after(self, step: int) -> list[int]:
        """The later steps of which all servers have some worker's pushes."""
        return [one for one in self._complete if one > step]

    def forget_before(self, step: int) -> None:
        """Drop what was said about earlier steps."""
        for reports in self._reports.values():
            for complete in reports.values():
                complete.difference_update([entry for entry in complete if entry[0] < step])
        for entry in [entry for entry in self._counts if entry[0] < step]:
            del self._counts[entry]
        for old in [old for old in self._complete if old < step]:
            del self._complete[old]
