"""What must hold of the values in every simulated run of workers and servers, with the numbers of the design's list.

Each gradient is a token: its only element that is not zero says whose it is, and the value of which step. So a mean
tells whose gradients it is made of.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.core.node import Peer
from cnnstrategies.paramserver.messages import ALONE, Encoding, Header
from cnnstrategies.paramserver.server.store import Changes, Store, encodings
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Options, Specification
from simulation.plane import ViolationError

MOST_WORKERS = 4
LIVES = 8
HEARD = 1.4  # seconds in which all have heard that a process counts as dead: until then it goes on
Token = tuple[int, int, int]
"""A worker, a step, and the worker's life."""
Content = tuple[int, bytes]
"""A slice, and its bytes."""


@cache
def gradient(worker: int, step: int, incarnation: int) -> Tensor:
    """A worker's gradient of a step, of every parameter."""
    token = torch.zeros(MOST_WORKERS, dtype=torch.float64)
    token[worker] = 1.0 + step + incarnation / LIVES
    return token


def rate(step: int) -> float:
    """The learning rate of a step: another than that of the steps beside it."""
    return (1.0, 0.7, 0.45)[step % 3]


class Watch:
    """Knows what each content of a slice is made of, and which of them workers have seen."""

    def __init__(self, specification: Specification) -> None:
        self.aggregates = specification.aggregates
        self.clipped = specification.clip_norm is not None
        self._pipelined = specification.pipelined
        self._changes = specification.pulls_changes
        self._made_of: dict[Content, tuple[frozenset[Token], frozenset[Token]]] = {}
        self._states: dict[Content, set[Content]] = {}
        self._visible: dict[tuple[int, int, int, bool], bytes] = {}
        self._epochs: dict[int, int] = {}
        self._forgiven: dict[int, int] = {}
        self._members: dict[tuple[int, int], tuple[frozenset[Token], set[int]]] = {}  # and the slices that have them
        self._answered: dict[int, dict[Token, float]] = {}
        self._begun_anew: dict[int, tuple[float, frozenset[Token]]] = {}
        self._begun: dict[int, float] = {}
        self._deaths: dict[str, list[tuple[float, Peer]]] = {"worker": [], "server": []}

    @property
    def highest(self) -> int:
        """The last step that a worker has begun."""
        return max(self._begun, default=-1)

    def begun(self, step: int, now: float) -> None:
        """A worker begins a step."""
        self._begun.setdefault(step, now)

    def died(self, peer: Peer, now: float) -> None:
        """A process has died, or counts as dead."""
        self._deaths[peer.role].append((now, peer))

    def made_of(self, key: int, value: Tensor) -> frozenset[Token]:
        """The tokens in a content."""
        return self._made_of.get(_content(key, value), (frozenset(), frozenset()))[0]

    def applied(self, key: int, version: int, before: frozenset[Token], update: Tensor | None, options: Options) -> Any:
        """A server applies an update to a version: its tokens; :meth:`became` comes next."""
        tokens = self._tokens(update, version)
        twice = tokens & before
        if twice:
            raise ViolationError(f"2: slice {key} holds {sorted(twice)} twice from version {version + 1} on")
        if self.aggregates and any(step != version for _, step, _ in tokens):
            raise ViolationError(f"3: version {version + 1} of slice {key} is made of {sorted(tokens)}")
        if any(options[0]["lr"] != rate(step) for _, step, _ in tokens):
            raise ViolationError(f"5: {sorted(tokens)} of slice {key} are applied with another step's learning rate")
        return before | tokens, tokens

    def _tokens(self, update: Tensor | None, version: int) -> frozenset[Token]:
        values = [] if update is None else update.view(-1).tolist()
        members = [worker for worker, value in enumerate(values) if value]
        if self.clipped:
            return frozenset((worker, version, 0) for worker in members)
        share = len(members) if self.aggregates else 1
        numbers = {worker: round(LIVES * (values[worker] * share - 1)) for worker in members}
        return frozenset((worker, number // LIVES, number % LIVES) for worker, number in numbers.items())

    def based_on(self, key: int, version: int, value: Tensor, state: Tensor | None) -> None:
        """A server applies an update to a content that it has, with the optimizer's state beside it."""
        states = self._states.get(_content(key, value))
        if states is not None and _content(key, state) not in states:
            raise ViolationError(f"18: version {version} of slice {key} has the optimizer's state of another")

    def became(self, key: int, value: Tensor, made_of: Any, state: Tensor | None) -> None:
        """A server has a new content, and the optimizer's state beside it."""
        content = _content(key, value)
        self._made_of[content] = made_of
        self._states.setdefault(content, set()).add(_content(key, state))

    def sent(self, key: int, known: Tensor, value: Tensor) -> None:
        """What workers will have of a content: changes leave something out, and the rest of it with the next."""
        self._made_of[_content(key, known)] = self._made_of[_content(key, value)]

    # What workers see

    def received(
        self, worker: Peer, header: Header, value: Tensor, whole: bool, server: Peer, sent: float, now: float
    ) -> None:
        """A worker takes a content that it waits for; as a `whole` it has asked for what is there."""
        key, version = header.key, header.base
        if any(one[:3] == worker[:3] for _, one in self._deaths["worker"]):
            return  # It counts as dead, and ends when it hears of that: what it takes until then does no harm.
        content = value.view(-1).numpy().tobytes()
        epoch = self._epochs.get(key, 0)
        kind = (whole or header.weight == ALONE) and self._changes  # Else what workers have leaves nothing out.
        seen = self._visible.setdefault((epoch, key, version, kind), content)
        tokens, last = self._made_of.get((key, content), (None, frozenset()))
        forgiven = header.step - 1 <= self._forgiven.get(key, -1)
        if self.aggregates and seen != content and not forgiven:
            raise ViolationError(f"6: version {version} of slice {key} has two contents")
        if tokens is None:
            if not forgiven and version > 0:
                raise ViolationError(f"5: version {version} of slice {key} at {worker} is no update's result")
            return
        missing = {token for token, at in self._answered.get(key, {}).items() if at < sent} - tokens
        # Where nobody waits for others a worker may be told what was, if neither it nor the server has heard yet that
        # another has taken the server's place.
        may_lag = not whole and not self.aggregates and any(peer == server for _, peer in self._deaths["server"])
        if missing and not forgiven and not may_lag:
            raise ViolationError(f"7: slice {key} lacks {sorted(missing)}, which were answered, in version {version}")
        if whole:
            # Of common steps a newcomer sees only what is safe; of others also what is on its way to the copies.
            self._seen(key, tokens if self.aggregates else (), server, sent, now)
            return
        own = (worker.id, header.step - 1, 0 if self.clipped else worker.incarnation)
        if own not in tokens and not forgiven:
            raise ViolationError(f"3: {worker} gets slice {key} without its own push of step {own[1]}")
        if self.aggregates and last and not forgiven:
            told, keys = self._members.setdefault((epoch, version), (last, set()))
            keys.add(key)
            if told != last and not self._torn(version - 1, told ^ last):
                raise ViolationError(f"4: step {version - 1} has {sorted(told)} in one slice, {sorted(last)} in {key}")
        self._seen(key, tokens if self.aggregates else {own}, server, sent, now)

    def _seen(self, key: int, tokens: Iterable[Token], server: Peer, sent: float, now: float) -> None:
        """A worker has had an answer with some tokens, maybe of a server that has been replaced since."""
        answered, (anew, kept) = self._answered.setdefault(key, {}), self._begun_anew.get(key, (0.0, frozenset()))
        replaced = sent < anew or any(at < anew and peer == server for at, peer in self._deaths["server"])
        for token in tokens:
            if not replaced or token in kept:
                answered.setdefault(token, now)

    def _torn(self, step: int, tokens: Iterable[Token]) -> bool:
        """Whether workers have died, and a server with what they had pushed: nobody can push that again.

        Where steps are pipelined the workers' deaths are enough: they had not pushed all.
        """
        since = self._begun.get(step, 0.0)
        workers = {peer.id for at, peer in self._deaths["worker"] if at >= since - HEARD}
        lost = self._pipelined or any(at >= since for at, _ in self._deaths["server"])
        return lost and workers >= {worker for worker, _, _ in tokens}

    def holds_all(self, key: int, value: Tensor) -> bool:
        """Whether a content has everything in it that was answered."""
        return self._answered.get(key, {}).keys() <= self.made_of(key, value)

    def begun_anew(self, key: int, value: Tensor, now: float) -> None:
        """A slice goes on from initial values, or from a copy that was never filled."""
        kept = self.made_of(key, value)
        self._begun_anew[key] = now, kept
        self._answered[key] = {token: at for token, at in self._answered.get(key, {}).items() if token in kept}
        for place, (members, keys) in list(self._members.items()):
            if not members <= kept:
                keys.discard(key)  # Here that update is no more: others may make the step with whoever is there now.
                if not keys:
                    del self._members[place]
        self._epochs[key] = self._epochs.get(key, 0) + 1
        self._forgiven[key] = self.highest + 1


def _content(key: int, value: Tensor | None) -> Content:
    return key, b"" if value is None else value.view(-1).numpy().tobytes()


class WatchedChanges(Changes):
    """What the workers have of some slices, of which each change is looked at.

    Args:
        ratio: Share of the elements that ``topk`` sends.
        whole: In which workers pull values where they do not want changes; None if they always do.
    """

    def __init__(
        self, encoding: int, ratio: float, values: Mapping[int, Tensor], whole: int | None, watch: Watch
    ) -> None:
        super().__init__(encoding, ratio, values, whole)
        self._watch = watch

    def apply(self, key: int, payload: memoryview, change: Tensor | None) -> None:
        """Workers will have a change, or the values."""
        super().apply(key, payload, change)
        if key not in self.behind:
            self._watch.sent(key, self.known[key], self._values[key])


class WatchedStore(Store):
    """A server's slices, of which each update is looked at.

    Args:
        late: Whether the server was started again: initial values that it has of a worker are no copies of the primary,
            which may not know yet that it is there.

    Attributes:
        whole: The slices that have once had everything in them that was answered before, as their primary's copies.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice], watch: Watch, late: bool) -> None:
        super().__init__(specification, slices)
        self._watch = watch
        self._late = late
        self.whole: set[int] = set()
        if specification.pulls_changes:
            encoding, whole = encodings(specification)
            exact = None if whole is None else Encoding.DENSE  # What two contents are rounded to may be the same.
            self.changes = WatchedChanges(encoding, specification.topk_density, self.values, exact, watch)

    def look(self, keys: Iterable[int]) -> None:
        """See which slices have everything in them that was answered."""
        for key in keys:
            if key not in self.whole and self._watch.holds_all(key, self.values[key]):
                self.whole.add(key)

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values."""
        super().put(key, value, version)
        if version or not self._late:
            self.look((key,))

    def apply(self, key: int, update: Tensor | None, options: Options, absent: int = 0) -> None:
        """Look at an update of a slice, and apply it."""
        version = self.versions[key]
        before = self._watch.made_of(key, self.values[key])
        self._watch.based_on(key, version, self.values[key], self._momentum(key))
        made_of = self._watch.applied(key, version, before, update, options)
        super().apply(key, update, options, absent)
        self._watch.became(key, self.values[key], made_of, self._momentum(key))
        self.look((key,))

    def _momentum(self, key: int) -> Tensor | None:
        momentum = self.state(key)[0].get("momentum_buffer")
        return momentum if isinstance(momentum, Tensor) else None
