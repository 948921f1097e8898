"""Whose pushes the servers have in full, as the leader has been told."""

from collections.abc import Collection

VIEWS_AHEAD = 16  # reports are kept for so many views that this server has not seen yet


class Reports:
    """The servers' reports under the present view, and under those that are to come."""

    def __init__(self) -> None:
        self._view = -1
        self._reports: dict[int, dict[int, set[tuple[int, int]]]] = {}

    def follow(self, view: int) -> None:
        """Go on with another view: every server reports anew."""
        self._view = view
        self._reports = {number: reports for number, reports in self._reports.items() if number >= view}

    def add(self, server: int, view: int, complete: Collection[tuple[int, int]]) -> None:
        """Note what a server has.

        Args:
            server: The server.
            view: Number of the view under which it says so.
            complete: Steps with workers whose pushes of that step it has in full.
        """
        if self._view <= view <= self._view + VIEWS_AHEAD:
            self._reports.setdefault(view, {}).setdefault(server, set()).update(complete)

    def complete(self, servers: Collection[int], step: int, workers: Collection[int]) -> set[int] | None:
        """Those workers whose pushes of a step all servers have; None if a server has not reported yet."""
        reports = self._reports.get(self._view, {})
        if reports.keys() < set(servers):
            return None
        return {worker for worker in workers if all((step, worker) in reports[server] for server in servers)}

    def forget_before(self, step: int) -> None:
        """Drop what was said about earlier steps."""
        for reports in self._reports.values():
            for complete in reports.values():
                complete.difference_update([entry for entry in complete if entry[0] < step])
