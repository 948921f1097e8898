"""Which copies of a slice have which version, so that nothing is acknowledged that a server's death could lose."""

from collections.abc import Mapping, Sequence

from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.slicing import Slice, holders


class Replicas:
    """The copies of the slices that one server holds, as the present view places them.

    Args:
        server: Id of the server.
        slices: The slices it holds, as primary or backup.
    """

    def __init__(self, server: int, slices: Mapping[int, Slice]) -> None:
        self._server = server
        self._slices = slices
        self._holders: dict[int, Sequence[int]] = {}
        self._backups: dict[int, Sequence[int]] = {}  # of the slices that this server is the primary of
        self._since: dict[int, int] = {}
        self._acknowledged: dict[tuple[int, int], int] = {}
        self._filling: dict[int, set[int]] = {}  # slices whose copies a server lacks that came after training began

    def place(self, view: View) -> list[tuple[int, int]]:
        """Follow a change of the view.

        Returns:
            (slice, server) of the backups that are new to this primary, and need a copy. At the run's start every
            backup is new; its copies are of slices without a value then, and cost nothing.
        """
        before = self._holders
        since = {server.id: server.since for server in view.servers}
        renewed = {server for server, number in since.items() if self._since.get(server, number) != number}
        self._since = since
        self._holders = {key: holders(slice_, view) for key, slice_ in self._slices.items()}
        self._backups = {key: named[1:] for key, named in self._holders.items() if named[:1] == [self._server]}
        needed = []
        for key in self._slices:
            was_primary = before.get(key, [-1])[:1] == [self._server]
            for backup in self.backups(key):
                if not was_primary or backup not in before[key] or backup in renewed:
                    self._acknowledged.pop((key, backup), None)
                    needed.append((key, backup))
        before_this = {(key, server) for server, missing in self._filling.items() for key in missing}
        self._filling = {}
        for key, backup in {*needed, *before_this}:
            if backup in self.backups(key) and 0 < view.begun < since[backup]:
                self._filling.setdefault(backup, set()).add(key)
        return needed

    def owns(self, key: int) -> bool:
        """Whether this server is the slice's primary."""
        return key in self._backups

    def primary(self, key: int) -> int:
        """The slice's primary; -1 if no live server holds it."""
        return next(iter(self._holders.get(key, [])), -1)

    def life(self, key: int) -> tuple[int, int]:
        """The slice's primary, and the view that its present process came with."""
        primary = self.primary(key)
        return primary, self._since.get(primary, -1)

    def backups(self, key: int) -> Sequence[int]:
        """The servers that this primary sends the slice's updates to; none if it is not the primary."""
        return self._backups.get(key, ())

    @property
    def all_backups(self) -> set[int]:
        """The servers that this primary sends updates of any slice to."""
        return {backup for named in self._backups.values() for backup in named}

    def acknowledged(self, key: int, backup: int, version: int) -> bool:
        """A backup has the slice up to a version; whether it has come late, and has all its copies now."""
        self._acknowledged[key, backup] = max(version, self._acknowledged.get((key, backup), -1))
        missing = self._filling.get(backup)
        if missing is None:
            return False
        missing.discard(key)
        if missing:
            return False
        del self._filling[backup]
        return True

    def safe(self, key: int, version: int) -> bool:
        """Whether every copy of a slice has a version, so that workers may see it."""
        return all(self._acknowledged.get((key, backup), -1) >= version for backup in self.backups(key))
