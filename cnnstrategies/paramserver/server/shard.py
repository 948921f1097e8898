"""A server's slices as the workers see them: replies to pulls, updates and initial values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cnnstrategies.paramserver.compression import PAYLOADS, from_bytes, payload_compression
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    ALONE,
    Encoding,
    Header,
    Kind,
    OutdatedMessageError,
    Say,
)
from cnnstrategies.paramserver.optimizer_state import pack_state, split_state
from cnnstrategies.paramserver.server.copies import Copies
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.store import MemberKey, Store, Update
from cnnstrategies.paramserver.specification import Options, Specification


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker's request for the values of a slice. The reply is a PULLED message.

    Attributes:
        request: Step in the PULL message. The reply contains the same step.
        version: The lowest version that the worker accepts.
        member: In modes in which workers make steps independently: id and incarnation of the worker. The reply waits
            until the worker's own push of `step` is applied. None if the reply waits only for `version`.
        step: Step of the push for which the reply waits, if `member` is not None.
        whole: Whether to send the exact values, without compression.
        state: Whether to send the optimizer's state instead of the values.
        encoding: Encoding of the reply; `NOTHING` for the specification's encoding.
        mark: In a run in which workers pull changes: number that identifies the values that the worker holds (see
            :mod:`.store`). 0 for values without a mark.
        question: Id of a pull that requests the current values; 0 for any other pull. The reply contains the same id.
            See :class:`~cnnstrategies.paramserver.messages.Header`.
    """

    request: int
    version: int = 0
    member: MemberKey | None = None
    step: int = -1
    whole: bool = False
    state: bool = False
    encoding: int = Encoding.NOTHING
    mark: float = 0.0
    question: int = 0


class Shard:
    """The slices of one server, with the pulls that wait for new values.

    Attributes:
        store: The slices' values and optimizers.
        own_keys: Keys of the slices whose primary is this server, in the order in which the workers use them.
        own_key_set: The keys in `own_keys` as a set.
        copies: The exchange of copies with the other servers.
    """

    def __init__(self, specification: Specification, server: int, outbox: Outbox, store: Store) -> None:
        self.store = store
        self.own_keys: list[int] = []
        self.own_key_set: frozenset[int] = frozenset()
        self.copies = Copies(server, outbox, store)
        self._server = server
        self._level = 0
        self._outbox = outbox
        self._encoding = payload_compression(specification.pull_compression).encoding
        self._order = {key: place for place, key in enumerate(store.slices)}
        self._pulls: dict[int, dict[int, Pull]] = {key: {} for key in store.slices}

    @property
    def ready(self) -> bool:
        """Whether all slices whose primary is this server have received their initial values."""
        return all(self.store.versions[key] >= 0 for key in self.own_keys)

    def place(self, view: View) -> None:
        """Act on a new view: determine the slices whose primary is now this server, and send copies to new backups.

        Pulls of workers that are no longer members are dropped. Pulls that waited for a dead backup get their replies.
        """
        needed = self.copies.place(view)
        self._sort()
        alive = {worker.id for worker in view.workers}
        for waiting in self._pulls.values():
            for worker in waiting.keys() - alive:
                del waiting[worker]
        for key, backup in needed:
            self.copies.send(key, [backup])
        for key in self.own_keys:
            self.answer(key)

    def order_by_use(self, keys: Sequence[int]) -> None:
        """Sort `own_keys` in the order in which a worker uses the slices.

        Args:
            keys: Keys in the order of use. The order changes only if there are as many keys as in `own_keys`.
        """
        if len(keys) == len(self.own_keys) and keys != self.own_keys:
            self._order.update((key, place) for place, key in enumerate(keys))
            self._sort()

    def _sort(self) -> None:
        self.own_keys = sorted(filter(self.copies.is_primary, self.store.slices), key=self._order.__getitem__)
        self.own_key_set = frozenset(self.own_keys)

    # Pulls

    def pull(self, worker: int, keys: Iterable[int], pull: Pull) -> None:
        """Keep a worker's pull of some slices. Each slice is sent as soon as it has the version that the worker needs.

        Args:
            worker: Id of the worker.
            keys: Keys of the slices.
            pull: The pull, which replaces the worker's earlier pull of each of these slices.
        """
        for key in keys:
            self._pulls[key][worker] = pull
            if self.store.versions[key] >= pull.version:
                self.answer(key)

    def pull_of(self, key: int, worker: int, request: int) -> Pull | None:
        """Return a worker's pull of a slice that has not received its reply yet. Return None if there is no such pull.

        Args:
            key: Key of the slice.
            worker: Id of the worker.
            request: The step in the worker's PULL message.
        """
        pull = self._pulls[key].get(worker)
        return pull if pull is not None and pull.request == request else None

    def answer(self, key: int) -> None:
        """Reply to the waiting pulls of a slice that accept the slice's current version.

        A reply also waits until all backups have the version that the worker needs. Otherwise the worker could receive
        values that are lost if this server dies.
        """
        waiting = self._pulls[key]
        if not waiting or key not in self.own_key_set:
            return
        version = self.store.versions[key]
        encoded: dict[int, Any] = {Encoding.DENSE: self.store.memory[key]}
        for worker, pull in list(waiting.items()):
            if pull.member is not None:
                if self.store.seen[key].get(pull.member, -1) < pull.step:
                    continue
                pull = waiting[worker] = replace(pull, version=version, member=None)
            if version < pull.version or not self.copies.safe(key, pull.version):
                continue
            del waiting[worker]
            payload, encoding, mark = self._encode_answer(key, pull, version, encoded)
            self._outbox.to_worker(
                worker, Kind.PULLED, payload, key=key, step=pull.request, base=version, encoding=encoding,
                weight=mark, level=self._level, question=pull.question,
            )  # fmt: skip

    def _encode_answer(self, key: int, pull: Pull, version: int, encoded: dict[int, Any]) -> tuple[Any, int, float]:
        """Return the reply to a pull: the payload, its encoding, and the mark of the values that the worker then holds.

        Args:
            key: Key of the slice.
            pull: The worker's pull.
            version: Current version of the slice.
            encoded: Payloads of the slice's values that exist already, with their encodings as keys. The method adds
                each new payload, so the values are encoded only once for all workers.
        """
        if pull.state:
            return pack_state(self.store.state(key)), Encoding.NOTHING, 0.0
        changes = None if pull.whole else self.store.changes
        answer = changes and changes.answer(key, pull.mark, version == pull.version, pull.encoding)
        if answer:
            return answer
        encoding = Encoding.DENSE if pull.whole else pull.encoding or self._encoding
        payload = None if changes is None else changes.encoded_values(key, encoding)
        if encoding not in encoded:
            encoded[encoding] = PAYLOADS[encoding].encode_values(self.store.values[key]) if payload is None else payload
        mark = 0.0 if changes is None else ALONE if payload is None else changes.mark(key)
        return encoded[encoding], encoding, mark

    def update(
        self,
        updates: Mapping[int, Update],
        options: Options,
        member: MemberKey,
        step: int,
        pulls: Collection[int] = (),
        level: int = 0,
    ) -> None:
        """Update slices, send the updates to the backups, and reply to the pulls that waited for the updates.

        Args:
            updates: Updates of the slices by key: one slice, or all slices if the optimizer makes the steps of all
                parameters together.
            options: Hyperparameters of the update.
            member: Id and incarnation of the worker that computed the gradient; `ALL_MEMBERS` for the mean gradient of
                a common step.
            step: Step of the update.
            pulls: Encodings in which the workers will pull the new values, if workers choose encodings.
            level: The `level` in the BEGIN message of the first worker in the step's decision; see
                :attr:`~cnnstrategies.paramserver.messages.Header.level`.
        """
        self._level = level
        self.store.apply_all(updates, options)
        for key, (gradient, absent) in updates.items():
            self.store.seen[key][member] = step
            change = b"" if self.store.changes is None else self.store.changes.make(key, pulls)
            self.copies.relay(key, gradient, options, member, step, change, absent)
        for key in updates:
            self.answer(key)

    def acknowledged(self, backup: int, key: int, version: int) -> None:
        """Record that a backup has applied all updates of a slice up to a version.

        Then reply to the pulls that waited for this acknowledgement.

        Args:
            backup: Id of the backup's server.
            key: Key of the slice.
            version: Version of the slice on the backup.

        Raises:
            InvalidMessageError: This server does not hold the slice.
        """
        if key not in self.store.slices:
            raise OutdatedMessageError("the acknowledgement is for a slice that this server does not hold")
        if self.copies.acknowledged(key, backup, version):
            text = f"server {backup} now has copies of all slices that it backs up for server {self._server}"
            self._outbox.effects.append(Say(text, True))
        self.answer(key)

    def initialise(self, header: Header, payload: memoryview) -> None:
        """Store the initial values and the optimizer's state of a slice. Only the first VALUE message has an effect.

        Args:
            header: Header of the VALUE message.
            payload: The optimizer's state, then the values.

        Raises:
            InvalidMessageError: Another server is the slice's primary, or the payload does not fit the slice.
        """
        key = header.key
        if key not in self.own_key_set:
            raise OutdatedMessageError("the initial values are for a slice whose primary is another server")
        slice_ = self.store.slices[key]
        state, values = split_state(payload, slice_)
        if self.store.versions[key] < 0:
            self.store.set_state(key, state)
            self.store.put(key, from_bytes(values, slice_.dtype), 0)
            self.copies.send(key)
            self.answer(key)
