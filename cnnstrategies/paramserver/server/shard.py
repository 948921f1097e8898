"""The slices of one server towards the workers: answers pulls, makes updates, takes first values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.compression import ENCODINGS, as_bytes, check_length, from_bytes, rounded
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError, Kind, Say
from cnnstrategies.paramserver.optimizer_state import check_part, pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import ALL_THERE
from cnnstrategies.paramserver.server.copies import Copies, Replicas
from cnnstrategies.paramserver.server.pushes import NOTHING_CHOSEN, Chosen, Who
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.store import Store
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
        encoding: What they are sent in; `NOTHING` for that of the specification.
        mark: Where changes are sent: of what it has of the version before; 0 if it has another, or none.
        question: Comes back with the answer, too; see :class:`~cnnstrategies.paramserver.messages.Header`.
    """

    request: int
    version: int = 0
    who: Who | None = None
    step: int = -1
    whole: bool = False
    encoding: Encoding = Encoding.NOTHING
    mark: float = 0.0
    question: int = 0


class Shard:
    """A server's slices with their copies elsewhere and the pulls that wait for them.

    Attributes:
        store: The values.
        own: Keys of the slices that this server is the primary of, in the order of use.
        owned: The same as a set.
        copies: Those of the slices, here and elsewhere.
    """

    def __init__(self, specification: Specification, server: int, outbox: Outbox, store: Store) -> None:
        self.store = store
        self._server = server
        self.own: list[int] = []
        self.owned: frozenset[int] = frozenset()
        self._replicas = Replicas(server, self.store.slices)
        self.copies = Copies(self._replicas, outbox, store)
        self._rung = 0
        self._outbox = outbox
        self._encoding = ENCODINGS[specification.pull_compression]
        self._order = {key: place for place, key in enumerate(self.store.slices)}
        self._pulls: dict[int, dict[int, Pull]] = {key: {} for key in self.store.slices}

    @property
    def ready(self) -> bool:
        """Whether all slices that this server is the primary of have values."""
        return all(self.store.versions[key] >= 0 for key in self.own)

    def place(self, view: View) -> None:
        """Follow a change of the view; new backups get copies."""
        needed = self._replicas.place(view)
        self.copies.follow()
        self._sort()
        alive = {worker.id for worker in view.workers}
        for waiting in self._pulls.values():
            for worker in waiting.keys() - alive:
                del waiting[worker]
        for key, backup in needed:
            self.copies.send(key, backup)
        for key in self.own:
            self.answer(key)

    def _sort(self) -> None:
        owned = [key for key in self.store.slices if self._replicas.owns(key)]
        self.own = sorted(owned, key=lambda key: self._order[key])
        self.owned = frozenset(owned)

    # Pulls

    def pull(self, worker: int, keys: list[int], pull: Pull) -> None:
        """A worker wants slices; `keys` are in the order in which it needs them."""
        if len(keys) == len(self.own) and keys != self.own:
            self._order.update((key, place) for place, key in enumerate(keys))
            self._sort()
        for key in keys:
            self.pull_one(worker, key, pull)

    def pull_one(self, worker: int, key: int, pull: Pull) -> None:
        """A worker wants a slice."""
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
        encoded: dict[Encoding, Any] = {Encoding.DENSE: self.store.memory[key]}
        for worker, pull in list(waiting.items()):
            if pull.who is not None:
                if self.store.seen[key].get(pull.who, -1) < pull.step:
                    continue
                pull = waiting[worker] = replace(pull, version=version, who=None)
            if version < pull.version or not self._replicas.safe(key, pull.version):
                continue
            del waiting[worker]
            changes = None if pull.whole else self.store.changes
            answer = changes and changes.answer(key, pull.mark, version == pull.version, pull.encoding)
            if answer:
                payload, encoding, mark = answer
                self._outbox.to_worker(
                    worker, Kind.PULLED, payload, key=key, step=pull.request, base=version, encoding=encoding,
                    weight=mark, rung=self._rung,
                )  # fmt: skip
                continue
            encoding = Encoding.DENSE if pull.whole else pull.encoding or self._encoding
            if encoding not in encoded:
                values = None if changes is None else changes.values(key, encoding)
                encoded[encoding] = as_bytes(rounded(self.store.values[key], encoding) if values is None else values)
            weight = 0.0 if changes is None else changes.mark_of_values(key, encoding)
            self._outbox.to_worker(
                worker, Kind.PULLED, encoded[encoding], key=key, step=pull.request, base=version, weight=weight,
                encoding=encoding, rung=self._rung, question=pull.question,
            )  # fmt: skip

    # Updates

    def update(
        self,
        changes: Mapping[int, Tensor | None],
        options: Options,
        who: Who,
        step: int,
        absent: Mapping[int, int] = ALL_THERE,
        chosen: Chosen = NOTHING_CHOSEN,
    ) -> None:
        """Apply an update of some slices here, send it to the backups, and answer the pulls that it makes possible.

        Args:
            changes: By slice.
            options: Each parameter group's hyper-parameters.
            who: Whose update it is.
            step: Of which step.
            absent: The parts of slices that have no gradient, as bits.
            chosen: How workers will pull what comes of it, where they may choose.
        """
        self._rung = chosen.rung
        self.store.apply(changes, options, absent)
        for key, change in changes.items():
            self.store.seen[key][who] = step
            sent = b"" if self.store.changes is None else self.store.changes.make(key, chosen.pulls)
            self.copies.relay(key, change, options, who, step, sent, absent.get(key, 0))
            self.answer(key)

    def acknowledged(self, backup: int, key: int, version: int) -> None:
        """A backup has a slice up to a version."""
        if key not in self.store.slices:
            raise InvalidMessageError("a slice of another server")
        if self._replicas.acknowledged(key, backup, version):
            text = f"server {self._server} has filled server {backup}: its slices have all their copies again"
            self._outbox.effects.append(Say(text, True))
        self.answer(key)

    # First values, optimizer state

    def initialise(self, header: Header, described: dict[str, object], payload: memoryview) -> None:
        """Take a slice's first value, or a part of its optimizer state before that; later ones change nothing.

        Raises:
            InvalidMessageError: The slice is not held here, the payload does not fit, or a part of the state was lost:
                all comes again, since the worker hears that the slice has no value.
        """
        if header.key not in self.store.slices:
            raise InvalidMessageError("a slice of another server")
        if header.kind == Kind.STATE:
            if self.store.versions[header.key] < 0:
                self._set_state(header.key, described, payload[header.meta :])
            return
        slice_ = self.store.slices[header.key]
        check_length(len(payload), Encoding.DENSE, slice_.numel, slice_.dtype)
        if self.store.versions[header.key] < 0:
            if len(self.store.state(header.key)) < header.base:
                raise InvalidMessageError("a first value without all of its optimizer's state")
            self.store.put(header.key, from_bytes(payload, slice_.dtype), 0)
            if header.key in self.owned:
                # One that came while there was nothing to copy may not be among those whom the worker gives them.
                self.copies.send_to_all(header.key)
        if header.key in self.owned:
            self.answer(header.key)
        else:
            self.copies.acknowledge(header.key)

    def _set_state(self, key: int, described: dict[str, object], raw: memoryview) -> None:
        name, value = unpack_state(described, raw)
        state = self.store.state(key)
        check_part(name, state, self.store.slices[key])
        self.store.set_state(key, name, value)

    def send_state(self, worker: int, request: int) -> None:
        """Send the optimizer state of all own slices, and then how many parts that were."""
        count = 0
        for key in self.own:
            for name, value in self.store.state(key).items():
                described, raw = pack_state(name, value)
                self._outbox.to_worker(worker, Kind.STATE_IS, raw, key=key, step=request, json=described)
                count += 1
        self._outbox.to_worker(worker, Kind.STATE_IS, step=request, base=count)
