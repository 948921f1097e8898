"""Which server a worker sends each slice's pushes and pulls to."""

from collections.abc import Sequence

from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.slicing import Slice, holders


class Placement:
    """The primaries of all slices in the present view; none of them has one before the first view.

    Args:
        slices: All slices.

    Attributes:
        orphans: How many slices have no live server.
        owners: The primary of each slice, and since which view it is there.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.orphans = 0
        self._slices = slices
        self.owners: list[tuple[int, int]] = [(-1, 0)] * len(slices)

    def follow(self, view: View) -> list[int]:
        """Find the primaries in another view.

        Returns:
            The slices whose primary is now another server, or another process of the same one.
        """
        since = {server.id: server.since for server in view.servers}
        before = self.owners
        primaries = [next(iter(holders(slice_, view)), -1) for slice_ in self._slices]
        self.owners = [(primary, since.get(primary, 0)) for primary in primaries]
        self.orphans = primaries.count(-1)
        return [key for key, owner in enumerate(self.owners) if owner != before[key]]

    def primary(self, key: int) -> int:
        """A slice's primary; -1 if it has none."""
        return self.owners[key][0]

    def of(self, server: int) -> list[int]:
        """The slices that a server is the primary of."""
        return [key for key, owner in enumerate(self.owners) if owner[0] == server]

    def servers(self) -> set[int]:
        """The servers that are the primary of some slice."""
        return {server for server, _ in self.owners}
