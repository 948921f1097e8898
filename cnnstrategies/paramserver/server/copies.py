"""Copies of slices: the servers that hold them, the messages from a primary to its backups, and the backups' replies.

A primary sends every update of a slice to the slice's backups, and each backup applies the updates in the same order.
If a backup has missed an update, the primary sends the whole slice.
"""

from collections.abc import Sequence
from enum import StrEnum

from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes, check_length, from_bytes
from cnnstrategies.paramserver.core.node import Message, StateTable
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    LARGEST_NUMBER,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    OutdatedMessageError,
)
from cnnstrategies.paramserver.optimizer_state import pack_state, split_state
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.store import MemberKey, Store, check_absent
from cnnstrategies.paramserver.slicing import holders
from cnnstrategies.paramserver.specification import Options


class SliceState(StrEnum):
    """States of a slice on a server that holds it.

    Attributes:
        UNPLACED: This server is not a member of a view yet.
        PRIMARY: This server is the slice's primary: it applies the workers' gradients, and replies to their pulls.
        LACKING: This server has a backup without a whole copy from the current primary's process. Its values may differ
            from the primary's values even if both have the same version, so updates are ignored.
        COPIED: This server has a backup that began with a whole copy from the current primary's process.
    """

    UNPLACED = "unplaced"
    PRIMARY = "primary"
    LACKING = "lacking"
    COPIED = "copied"


class SliceEvent(StrEnum):
    """Events that change the state of a slice on a server.

    Attributes:
        LEADS: In a new view this server is the slice's primary.
        FOLLOWS: In a new view another process than before is the slice's primary.
        STAYS: In a new view the same process as before is the slice's primary.
        GETS_COPY: A whole copy from the primary has arrived.
    """

    LEADS = "leads"
    FOLLOWS = "follows"
    STAYS = "stays"
    GETS_COPY = "gets copy"


UNPLACED, PRIMARY, LACKING, COPIED = SliceState
LEADS, FOLLOWS, STAYS, GETS_COPY = SliceEvent
HELD_SLICE = StateTable(
    "slice on a server",
    UNPLACED,
    {
        UNPLACED: {LEADS: PRIMARY, FOLLOWS: LACKING},
        PRIMARY: {LEADS: PRIMARY, FOLLOWS: LACKING},
        LACKING: {LEADS: PRIMARY, FOLLOWS: LACKING, STAYS: LACKING, GETS_COPY: COPIED},
        COPIED: {LEADS: PRIMARY, FOLLOWS: LACKING, STAYS: COPIED, GETS_COPY: COPIED},
    },
)


class Copies:
    """A server's exchange of copies with the other servers.

    The server is the primary of some slices, and holds backups of other slices.
    """

    def __init__(self, server: int, outbox: Outbox, store: Store) -> None:
        self._server = server
        self._outbox = outbox
        self._store = store
        self._states = dict.fromkeys(store.slices, HELD_SLICE.start)
        # By key: ids of the live servers that hold the slice; the first of them is the primary.
        self._holders: dict[int, Sequence[int]] = {}
        self._since: dict[int, int] = {}  # By server id: number of the first view with the server's current process.
        # By key and id of a backup's server: version of the slice that the backup's server has reported last.
        self._acknowledged: dict[tuple[int, int], int] = {}
        # Ids of servers that were started during training and do not have copies of all slices of this server yet.
        self._late: set[int] = set()

    def place(self, view: View) -> list[tuple[int, int]]:
        """Determine the primary and the backups of each slice in a new view.

        Returns pairs of a key and a server id. This server is the primary of the slice with this key. The server with
        this id holds a backup of the slice, and needs a whole copy. At the start of the run all backups need copies,
        but :meth:`send` does nothing then, because the slices have no values yet.
        """
        before, primaries = self._holders, {key: self._incarnation(key) for key in self._store.slices}
        since = {server.id: server.since for server in view.servers}
        renewed = {server for server, first_view in since.items() if self._since.get(server, first_view) != first_view}
        self._since = since
        self._holders = {key: holders(slice_, view) for key, slice_ in self._store.slices.items()}
        needed = []
        for key, state in self._states.items():
            if self._server not in since:
                continue
            if self._primary(key) != self._server:
                stays = self._incarnation(key) == primaries[key]
                self._happen(key, SliceEvent.STAYS if stays else SliceEvent.FOLLOWS)
                continue
            self._happen(key, SliceEvent.LEADS)
            for backup in self._backups(key):
                if state != SliceState.PRIMARY or backup not in before[key] or backup in renewed:
                    self._acknowledged.pop((key, backup), None)
                    needed.append((key, backup))
        self._late |= {backup for _, backup in needed if 0 < view.begun < since[backup]}
        self._late &= since.keys()
        return needed

    def _happen(self, key: int, event: SliceEvent) -> None:
        self._states[key] = HELD_SLICE.after(self._states[key], event)

    def is_primary(self, key: int) -> bool:
        """Return whether this server is the primary of a slice."""
        return self._states.get(key) == SliceState.PRIMARY

    def _backups(self, key: int) -> Sequence[int]:
        """Return the ids of the servers that hold the backups of a slice whose primary is this server."""
        return self._holders[key][1:] if self.is_primary(key) else ()

    def _primary(self, key: int) -> int:
        """Return the id of the server that is a slice's primary. Return -1 if no live server holds the slice."""
        return next(iter(self._holders.get(key, [])), -1)

    def _incarnation(self, key: int) -> tuple[int, int]:
        """Return a pair of numbers that identifies the process of a slice's primary.

        The numbers are the server's id and the number of the first view with the process. Both are -1 if no live server
        holds the slice.
        """
        primary = self._primary(key)
        return primary, self._since.get(primary, -1)

    def acknowledged(self, key: int, backup: int, version: int) -> bool:
        """Record that a backup has applied all updates of a slice up to a version.

        Args:
            key: Key of the slice.
            backup: Id of the backup's server.
            version: Version of the slice on the backup.

        Returns True once for each server that was started during training: as soon as that server has copies of all
        slices that it backs up for this primary. Returns False in all other cases.
        """
        self._acknowledged[key, backup] = max(version, self._acknowledged.get((key, backup), -1))
        keys = [key for key in self._states if backup in self._backups(key)] if backup in self._late else []
        filled = bool(keys) and all(self._acknowledged.get((key, backup), -1) >= 0 for key in keys)
        if filled:
            self._late.remove(backup)
        return filled

    def safe(self, key: int, version: int) -> bool:
        """Return whether all backups of a slice have version `version` or a later version.

        Workers may then receive values of this version, because the values survive the death of this server.
        """
        return all(self._acknowledged.get((key, backup), -1) >= version for backup in self._backups(key))

    # Methods for slices whose primary is this server

    def relay(
        self, key: int, gradient: Tensor | None, options: Options, member: MemberKey, step: int,
        change: bytes | memoryview, absent: int,
    ) -> None:  # fmt: skip
        """Send an update to the slice's backups, after this primary has applied it.

        Args:
            key: Key of the slice.
            gradient: Gradient of the slice; None if the update does not change the values.
            options: Hyperparameters of the update.
            member: Id and incarnation of the worker that computed the gradient; `ALL_MEMBERS` for the mean gradient of
                a common step.
            step: Step of the update.
            change: Payload from :meth:`.store.Changes.make`; empty in a run in which workers do not pull changes.
            absent: Bit i is set if part i of the slice has no gradient.
        """
        fields = {"absent": absent, **(self._store.decided or {"options": options})}
        payload = b"" if gradient is None else as_bytes(gradient)
        for backup in self._backups(key):
            self._outbox.to_server(
                backup,
                Kind.RELAY,
                b"".join((payload, change)) if change else payload,
                json=fields,
                key=key,
                step=step,
                base=member[1] << 32 | member[0],
                weight=self._store.versions[key],
                encoding=Encoding.NOTHING if gradient is None else Encoding.DENSE,
            )

    def send(self, key: int, backups: Sequence[int] | None = None) -> None:
        """Send a whole slice to backups.

        The copy contains the values, the optimizer's state, and for each worker the last step whose gradient was
        applied. If workers pull changes, it also contains the record of the values that workers hold.

        Args:
            key: Key of the slice, whose primary is this server.
            backups: Ids of the backup servers that need the slice; None for all its backups.
        """
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
        # `join` copies the values. Without a copy, an update could change the values before the message is sent.
        payload = b"".join((pack_state(self._store.state(key)), known, self._store.memory[key]))
        for backup in self._backups(key) if backups is None else backups:
            self._outbox.to_server(backup, Kind.COPY, payload, key=key, base=version, json=fields)

    def repeat_for(self, server: int) -> None:
        """Send copies and acknowledgements again to a server that has missed messages from this server."""
        for key in self._store.slices:
            if server in self._backups(key):
                self.send(key, [server])
            elif self._primary(key) == server and self._store.versions[key] >= 0:
                self.acknowledge(key)

    # Methods for slices that this server holds as a backup

    def relayed(
        self, primary: int, header: Header, payload: memoryview, options: Options, absent: int
    ) -> None:  # fmt: skip
        """Act on a RELAY message: apply an update that the slice's primary has applied.

        Args:
            primary: Id of the server that sent the message.
            header: Header of the message.
            payload: The gradient. In a run in which workers pull changes, the change follows the gradient.
            options: Hyperparameters of the update.
            absent: Bit i is set if part i of the slice has no gradient.

        Raises:
            InvalidMessageError: The sender is not the slice's primary, or the payload does not fit the slice.
        """
        self._check_primary(primary, header.key)
        slice_, changes = self._store.slices[header.key], self._store.changes
        check_absent(absent, slice_)
        if changes is not None:
            size = slice_.nbytes if header.encoding == Encoding.DENSE else 0
            payload, change = payload[:size], payload[size:]
            difference = changes.decoded(header.key, change)
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        # If this backup has missed an update, it ignores later updates until the primary has sent a whole copy.
        is_copied = self._states[header.key] == SliceState.COPIED
        if is_copied and self._store.versions[header.key] == header.weight - 1:
            gradient = from_bytes(payload, slice_.dtype) if header.encoding == Encoding.DENSE else None
            self._store.apply(header.key, gradient, options, absent)
            if changes is not None:
                changes.apply(header.key, change, difference)
            self._store.seen[header.key][header.base & 0xFFFFFFFF, header.base >> 32] = header.step
            self.acknowledge(header.key)

    def copied(self, primary: int, header: Header, message: Message, raw: memoryview) -> None:
        """Act on a COPY message: replace this server's backup of a slice by the copy in the message.

        Args:
            primary: Id of the server that sent the message.
            header: Header of the message.
            message: The JSON fields of the message.
            raw: The payload after the JSON object. It contains the optimizer's state, then (only in a run in which
                workers pull changes) the values that workers hold, and then the slice's values.

        Raises:
            InvalidMessageError: The sender is not the slice's primary, or the payload does not fit the slice.
            ControlError: A field is missing or has the wrong type.
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
        if changes is not None:
            changes.take_over(header.key, from_bytes(values[: slice_.nbytes], slice_.dtype), lineage, behind)
        self._happen(header.key, SliceEvent.GETS_COPY)
        self.acknowledge(header.key)

    def acknowledge(self, key: int) -> None:
        """Report to a slice's primary which version of the slice this backup has."""
        self._outbox.to_server(self._primary(key), Kind.ACKNOWLEDGE, key=key, base=self._store.versions[key])

    def _check_primary(self, server: int, key: int) -> None:
        if self._states.get(key) not in (SliceState.LACKING, SliceState.COPIED) or self._primary(key) != server:
            raise OutdatedMessageError("the sender of the update or copy is not the slice's primary")
