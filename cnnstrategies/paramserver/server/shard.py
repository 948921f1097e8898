"""A server's slices as the workers see them: answers to pulls, updates and first values."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.compression import PAYLOADS, from_bytes, payload_compression
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import ALONE, Encoding, Header, InvalidMessageError, Kind, Say
from cnnstrategies.paramserver.optimizer_state import pack_state, split_state
from cnnstrategies.paramserver.server.copies import Copies
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.store import MemberKey, Store
from cnnstrategies.paramserver.specification import Options, Specification


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker's request for a slice.

    Attributes:
        request: Step of the PULL, which the answer repeats.
        version: The lowest version that the worker accepts.
        member: The worker whose own push the values must contain, where the version does not show it.
        step: The step of that push.
        whole: Whether to send the values exactly, without compression.
        state: Whether to send the optimizer's state instead of the values.
        encoding: Encoding of the answer; `NOTHING` for the specification's encoding.
        mark: Where changes are sent: the mark of the worker's values of the version before; 0 if the worker has none.
        question: Number that the answer repeats; see :class:`~cnnstrategies.paramserver.messages.Header`.
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
    """A server's slices, with their copies and the pulls that wait for them.

    Attributes:
        store: The slices' values.
        own_keys: Keys of the slices whose primary is this server, in the order of use.
        own_key_set: The same keys as a set.
        copies: Copies of the slices, here and elsewhere.
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
        """Whether all own slices have values."""
        return all(self.store.versions[key] >= 0 for key in self.own_keys)

    def place(self, view: View) -> None:
        """Follow a change of the view, and send copies to new backups."""
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
        """Sort the own slices by the order in which a worker needs them, if `keys` are all of them."""
        if len(keys) == len(self.own_keys) and keys != self.own_keys:
            self._order.update((key, place) for place, key in enumerate(keys))
            self._sort()

    def _sort(self) -> None:
        self.own_keys = sorted(filter(self.copies.is_primary, self.store.slices), key=self._order.__getitem__)
        self.own_key_set = frozenset(self.own_keys)

    # Pulls

    def pull(self, worker: int, keys: Iterable[int], pull: Pull) -> None:
        """Keep a worker's request for some slices, and answer it as soon as possible."""
        for key in keys:
            self._pulls[key][worker] = pull
            if self.store.versions[key] >= pull.version:
                self.answer(key)

    def pull_of(self, key: int, worker: int, request: int) -> Pull | None:
        """Return a worker's waiting request for a slice, if it has the given `request` number."""
        pull = self._pulls[key].get(worker)
        return pull if pull is not None and pull.request == request else None

    def answer(self, key: int) -> None:
        """Send a slice to the workers that wait for it, if the slice is new enough and every copy has that version."""
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
        """Return a pull's answer, its encoding and its mark; values are encoded once for all workers."""
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

    # Updates

    def update(
        self,
        key: int,
        change: Tensor | None,
        options: Options,
        member: MemberKey,
        step: int,
        absent: int,
        pulls: Collection[int] = (),
        level: int = 0,
    ) -> None:
        """Apply an update of a slice, send it to the backups, and answer the pulls that waited for it.

        Args:
            key: Key of the slice.
            change: Gradient of the slice; None leaves the values alone.
            options: Hyper-parameters of the update.
            member: Id and incarnation of the worker whose update it is.
            step: Step of the update.
            absent: Parts of the slice without gradient, as bits.
            pulls: Encodings in which the workers will pull the result, where workers may choose.
            level: The first member's choice; see :attr:`~cnnstrategies.paramserver.messages.Header.level`.
        """
        self._level = level
        self.store.apply(key, change, options, absent)
        self.store.seen[key][member] = step
        sent = b"" if self.store.changes is None else self.store.changes.make(key, pulls)
        self.copies.relay(key, change, options, member, step, sent, absent)
        self.answer(key)

    def acknowledged(self, backup: int, key: int, version: int) -> None:
        """Note that a backup has a slice up to a version.

        Raises:
            InvalidMessageError: The slice is not on this server.
        """
        if key not in self.store.slices:
            raise InvalidMessageError("the slice belongs to another server")
        if self.copies.acknowledged(key, backup, version):
            text = (
                f"server {self._server} has copied its slices to server {backup}: every slice has all its copies again"
            )
            self._outbox.effects.append(Say(text, True))
        self.answer(key)

    # First values

    def initialise(self, header: Header, payload: memoryview) -> None:
        """Store a slice's first value and optimizer state; a later first value changes nothing.

        Raises:
            InvalidMessageError: Another server is the slice's primary, or the payload does not fit the slice.
        """
        key = header.key
        if key not in self.own_key_set:
            raise InvalidMessageError("the slice belongs to another server")
        slice_ = self.store.slices[key]
        state, values = split_state(payload, slice_)
        if self.store.versions[key] < 0:
            self.store.set_state(key, state)
            self.store.put(key, from_bytes(values, slice_.dtype), 0)
            self.copies.send(key)
            self.answer(key)
