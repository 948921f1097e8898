"""The slices of one server towards the workers: answers pulls, makes updates, takes first values."""

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
from cnnstrategies.paramserver.server.store import Store, Who
from cnnstrategies.paramserver.specification import Options, Specification


@dataclass(frozen=True, slots=True)
class Pull:
    """What a worker waits for.

    Attributes:
        request: Comes back with the answer.
        version: The version that it needs at least.
        who: The worker whose own push must be in it, where versions do not say that.
        step: The step of that push.
        whole: Send the values as they are here, without compression.
        state: Send the optimizer's state in their place.
        encoding: What they are sent in; `NOTHING` for that of the specification.
        mark: Where changes are sent: of what it has of the version before; 0 if it has another, or none.
        question: Comes back with the answer, too; see :class:`~cnnstrategies.paramserver.messages.Header`.
    """

    request: int
    version: int = 0
    who: Who | None = None
    step: int = -1
    whole: bool = False
    state: bool = False
    encoding: int = Encoding.NOTHING
    mark: float = 0.0
    question: int = 0


class Shard:
    """A server's slices with their copies elsewhere and the pulls that wait for them.

    Attributes:
        own: Keys of the slices that this server is the primary of, in the order of use.
        owned: The same as a set.
        copies: Those of the slices, here and elsewhere.
    """

    def __init__(self, specification: Specification, server: int, outbox: Outbox, store: Store) -> None:
        self.store = store
        self.own: list[int] = []
        self.owned: frozenset[int] = frozenset()
        self.copies = Copies(server, outbox, store)
        self._server = server
        self._level = 0
        self._outbox = outbox
        self._encoding = payload_compression(specification.pull_compression).encoding
        self._order = {key: place for place, key in enumerate(store.slices)}
        self._pulls: dict[int, dict[int, Pull]] = {key: {} for key in store.slices}

    @property
    def ready(self) -> bool:
        """Whether all slices that this server is the primary of have values."""
        return all(self.store.versions[key] >= 0 for key in self.own)

    def place(self, view: View) -> None:
        """Follow a change of the view; new backups get copies."""
        needed = self.copies.place(view)
        self._sort()
        alive = {worker.id for worker in view.workers}
        for waiting in self._pulls.values():
            for worker in waiting.keys() - alive:
                del waiting[worker]
        for key, backup in needed:
            self.copies.send(key, [backup])
        for key in self.own:
            self.answer(key)

    def use(self, keys: Sequence[int]) -> None:
        """Workers need the own slices in this order, if it is of all."""
        if len(keys) == len(self.own) and keys != self.own:
            self._order.update((key, place) for place, key in enumerate(keys))
            self._sort()

    def _sort(self) -> None:
        self.own = sorted(filter(self.copies.owns, self.store.slices), key=self._order.__getitem__)
        self.owned = frozenset(self.own)

    # Pulls

    def pull(self, worker: int, keys: Iterable[int], pull: Pull) -> None:
        """A worker wants some slices."""
        for key in keys:
            self._pulls[key][worker] = pull
            if self.store.versions[key] >= pull.version:
                self.answer(key)

    def pulled_by(self, key: int, worker: int, request: int) -> Pull | None:
        """What a worker waits for of a slice, if it is what it has asked for with a request."""
        pull = self._pulls[key].get(worker)
        return pull if pull is not None and pull.request == request else None

    def answer(self, key: int) -> None:
        """Send a slice to those who wait for it, if it is new enough and safe."""
        waiting = self._pulls[key]
        if not waiting or key not in self.owned:
            return
        version = self.store.versions[key]
        encoded: dict[int, Any] = {Encoding.DENSE: self.store.memory[key]}
        for worker, pull in list(waiting.items()):
            if pull.who is not None:
                if self.store.seen[key].get(pull.who, -1) < pull.step:
                    continue
                pull = waiting[worker] = replace(pull, version=version, who=None)
            if version < pull.version or not self.copies.safe(key, pull.version):
                continue
            del waiting[worker]
            payload, encoding, mark = self._answer(key, pull, version, encoded)
            self._outbox.to_worker(
                worker, Kind.PULLED, payload, key=key, step=pull.request, base=version, encoding=encoding,
                weight=mark, level=self._level, question=pull.question,
            )  # fmt: skip

    def _answer(self, key: int, pull: Pull, version: int, encoded: dict[int, Any]) -> tuple[Any, int, float]:
        """What a pull is answered with, its encoding and its mark; values are encoded once for all."""
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
        who: Who,
        step: int,
        absent: int,
        pulls: Collection[int] = (),
        level: int = 0,
    ) -> None:
        """Apply an update of a slice here, send it to the backups, and answer the pulls that it makes possible.

        A change of None leaves the values alone, and `absent` are the parts that have no gradient, as bits. Where
        workers may choose, `pulls` are the encodings in which they will pull what comes of it, and `rung` is what the
        first of them has chosen; see :attr:`~cnnstrategies.paramserver.messages.Header.rung`.
        """
        self._level = level
        self.store.apply(key, change, options, absent)
        self.store.seen[key][who] = step
        sent = b"" if self.store.changes is None else self.store.changes.make(key, pulls)
        self.copies.relay(key, change, options, who, step, sent, absent)
        self.answer(key)

    def acknowledged(self, backup: int, key: int, version: int) -> None:
        """A backup has a slice up to a version."""
        if key not in self.store.slices:
            raise InvalidMessageError("a slice of another server")
        if self.copies.acknowledged(key, backup, version):
            text = f"server {self._server} has filled server {backup}: its slices have all their copies again"
            self._outbox.effects.append(Say(text, True))
        self.answer(key)

    # First values

    def initialise(self, header: Header, payload: memoryview) -> None:
        """Take a slice's first value, with the optimizer's state; later ones change nothing.

        Raises:
            InvalidMessageError: Another server is the slice's primary, or the payload does not fit.
        """
        key = header.key
        if key not in self.owned:
            raise InvalidMessageError("a slice of another server")
        slice_ = self.store.slices[key]
        state, values = split_state(payload, slice_)
        if self.store.versions[key] < 0:
            self.store.set_state(key, state)
            self.store.put(key, from_bytes(values, slice_.dtype), 0)
            self.copies.send(key)
            self.answer(key)
