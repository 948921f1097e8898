"""Copies of slices: their places, what a primary sends to its backups, and how a backup takes over its primary's copy.

A backup applies the primary's updates in the primary's order. After a missed update the primary sends the whole slice
again.
"""

from collections.abc import Sequence

from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes, check_length, from_bytes
from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    LARGEST_NUMBER,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
)
from cnnstrategies.paramserver.optimizer_state import pack_state, split_state
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.store import MemberKey, Store, check_absent
from cnnstrategies.paramserver.slicing import holders
from cnnstrategies.paramserver.specification import Options


class Copies:
    """Copies of the slices that one server holds as primary or backup, as the present view places them."""

    def __init__(self, server: int, outbox: Outbox, store: Store) -> None:
        self._server = server
        self._outbox = outbox
        self._store = store
        self._holders: dict[int, Sequence[int]] = {}
        self._backups: dict[int, Sequence[int]] = {}  # of the slices whose primary is this server
        self._since: dict[int, int] = {}
        self._acknowledged: dict[tuple[int, int], int] = {}
        self._late: set[int] = set()  # servers that came after training began and still lack copies
        self._copied: dict[int, tuple[int, int]] = {}  # By key: the primary's process that the copy here comes from.

    # Places of the copies

    def place(self, view: View) -> list[tuple[int, int]]:
        """Follow a change of the view.

        At the start of the run every backup is new. The slices have no values then, so the copies cost nothing.

        Returns the keys and servers of the backups that need a whole copy from this primary.
        """
        before = self._holders
        since = {server.id: server.since for server in view.servers}
        renewed = {server for server, first_view in since.items() if self._since.get(server, first_view) != first_view}
        self._since = since
        self._holders = {key: holders(slice_, view) for key, slice_ in self._store.slices.items()}
        self._backups = {key: servers[1:] for key, servers in self._holders.items() if servers[:1] == [self._server]}
        needed = []
        for key, backups in self._backups.items():
            was_primary = before.get(key, [-1])[:1] == [self._server]
            for backup in backups:
                if not was_primary or backup not in before[key] or backup in renewed:
                    self._acknowledged.pop((key, backup), None)
                    needed.append((key, backup))
        self._late |= {backup for _, backup in needed if 0 < view.begun < since[backup]}
        self._late &= since.keys()
        self._copied = {
            key: incarnation for key, incarnation in self._copied.items() if self._incarnation(key) == incarnation
        }
        return needed

    def is_primary(self, key: int) -> bool:
        """Whether this server is the slice's primary."""
        return key in self._backups

    def _primary(self, key: int) -> int:
        """Return the id of the slice's primary; -1 if no live server holds the slice."""
        return next(iter(self._holders.get(key, [])), -1)

    def _incarnation(self, key: int) -> tuple[int, int]:
        """Return the slice's primary, and the number of the first view with the primary's present process."""
        primary = self._primary(key)
        return primary, self._since.get(primary, -1)

    def acknowledged(self, key: int, backup: int, version: int) -> bool:
        """Note that a backup has a slice up to a version.

        Returns whether the backup came late and now has all its copies.
        """
        self._acknowledged[key, backup] = max(version, self._acknowledged.get((key, backup), -1))
        keys = [key for key, backups in self._backups.items() if backup in backups] if backup in self._late else []
        filled = bool(keys) and all(self._acknowledged.get((key, backup), -1) >= 0 for key in keys)
        if filled:
            self._late.remove(backup)
        return filled

    def safe(self, key: int, version: int) -> bool:
        """Whether every copy of a slice has a version, so that workers may see that version."""
        return all(self._acknowledged.get((key, backup), -1) >= version for backup in self._backups.get(key, ()))

    # As primary

    def relay(
        self, key: int, change: Tensor | None, options: Options, member: MemberKey, step: int, sent: bytes | memoryview,
        absent: int,
    ) -> None:  # fmt: skip
        """Send an update that this primary has applied to the slice's backups.

        Args:
            key: Key of the slice.
            change: Gradient of the slice; None if the update leaves the values alone.
            options: Hyper-parameters of the update.
            member: Id and incarnation of the worker whose update it is.
            step: Step of the update.
            sent: What workers receive of the update, if they pull changes.
            absent: Parts of the slice that have no gradient, as bits.
        """
        fields = {"absent": absent, **(self._store.decided or {"options": options})}
        payload = b"" if change is None else as_bytes(change)
        for backup in self._backups.get(key, ()):
            self._outbox.to_server(
                backup,
                Kind.RELAY,
                b"".join((payload, sent)) if sent else payload,
                json=fields,
                key=key,
                step=step,
                base=member[1] << 32 | member[0],
                weight=self._store.versions[key],
                encoding=Encoding.NOTHING if change is None else Encoding.DENSE,
            )

    def send(self, key: int, backups: Sequence[int] | None = None) -> None:
        """Send a whole slice, with everything that belongs to it, to some of its backups; by default to all."""
        version, changes = self._store.versions[key], self._store.changes
        if version < 0:
            return
        fields = {
            "seen": [[*member, step] for member, step in self._store.seen[key].items()],
            "decided": self._store.decided,
            "lineage": 0 if changes is None else changes.lineages[key],
            "behind": changes is not None and key in changes.behind,
        }
        known = b"" if changes is None else as_bytes(changes.known[key])
        # This joins the values into new memory, because they may change here before the message leaves.
        payload = b"".join((pack_state(self._store.state(key)), known, self._store.memory[key]))
        for backup in self._backups.get(key, ()) if backups is None else backups:
            self._outbox.to_server(backup, Kind.COPY, payload, key=key, base=version, json=fields)

    def repeat_for(self, server: int) -> None:
        """Send a server the present state after it has missed messages."""
        for key in self._store.slices:
            if server in self._backups.get(key, ()):
                self.send(key, [server])
            elif self._primary(key) == server and self._store.versions[key] >= 0:
                self.acknowledge(key)

    # As backup

    def relayed(
        self, primary: int, header: Header, update: memoryview, options: Options, absent: int
    ) -> None:  # fmt: skip
        """Apply an update that the slice's primary has applied.

        Raises:
            InvalidMessageError: The sender is not the slice's primary, or the update does not fit the slice.
        """
        self._check_primary(primary, header.key)
        slice_, changes = self._store.slices[header.key], self._store.changes
        check_absent(absent, slice_)
        if changes is not None:  # What workers receive follows the update.
            size = slice_.nbytes if header.encoding == Encoding.DENSE else 0
            update, sent = update[:size], update[size:]
            known = changes.decoded(header.key, sent)
        check_length(len(update), header.encoding, slice_.numel, slice_.dtype)
        # After lost messages a whole copy must arrive before further updates apply. A copy from another primary may
        # have the same version with a different history.
        if header.key not in self._copied:
            return
        if self._store.versions[header.key] == header.weight - 1:
            change = from_bytes(update, slice_.dtype) if header.encoding == Encoding.DENSE else None
            self._store.apply(header.key, change, options, absent)
            if changes is not None:
                changes.apply(header.key, sent, known)
            self._store.seen[header.key][header.base & 0xFFFFFFFF, header.base >> 32] = header.step
            self.acknowledge(header.key)

    def copied(self, primary: int, header: Header, message: Message, raw: memoryview) -> None:
        """Replace a slice by its primary's copy.

        Raises:
            InvalidMessageError: The sender is not the slice's primary, or the payload does not fit the slice.
        """
        self._check_primary(primary, header.key)
        slice_, changes = self._store.slices[header.key], self._store.changes
        state, values = split_state(raw, slice_, 1 if changes is None else 2)
        seen, lineage, behind = message.table("seen", int, int, int), message.integer("lineage"), message.flag("behind")
        if header.base >= LARGEST_NUMBER:
            raise InvalidMessageError("the version is out of range")
        self._store.set_state(header.key, state)
        self._store.seen[header.key] = {(worker, incarnation): step for worker, incarnation, step in seen}
        self._store.put(header.key, from_bytes(values[-slice_.nbytes :], slice_.dtype), header.base)
        if changes is not None:  # What workers have comes before the values.
            changes.take_over(header.key, from_bytes(values[: slice_.nbytes], slice_.dtype), lineage, behind)
        self._copied[header.key] = self._incarnation(header.key)
        self.acknowledge(header.key)

    def acknowledge(self, key: int) -> None:
        """Report to a slice's primary which version is here."""
        self._outbox.to_server(self._primary(key), Kind.ACKNOWLEDGE, key=key, base=self._store.versions[key])

    def _check_primary(self, server: int, key: int) -> None:
        if key not in self._store.slices or self._primary(key) != server:
            raise InvalidMessageError("an update from a server that is not the slice's primary")
