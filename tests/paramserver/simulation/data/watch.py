"""Invariants of the values in every simulated run of workers and servers, numbered as in :mod:`.rules`.

Each gradient is a token with a single element that is not zero. The element's position names the worker, and its value
names the step and the worker's incarnation. So a mean gradient shows the gradients that it is made of.
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
from tests.paramserver.simulation.plane import ViolationError

MOST_WORKERS = 4
INCARNATIONS = 8
HEARD = 1.4  # Seconds after which all processes, the dead process included, know that a process counts as dead.
Token = tuple[int, int, int]
"""A worker, a step, and the worker's incarnation."""
Content = tuple[int, bytes]
"""The key of a slice, and the bytes of its values."""


@cache
def gradient(worker: int, step: int, incarnation: int) -> Tensor:
    """Return a worker's gradient of a step, which is the same for every parameter."""
    token = torch.zeros(MOST_WORKERS, dtype=torch.float64)
    token[worker] = 1.0 + step + incarnation / INCARNATIONS
    return token


def rate(step: int) -> float:
    """Return the learning rate of a step, which differs from the rates of the steps before and after it."""
    return (1.0, 0.7, 0.45)[step % 3]


class Watch:
    """Record of the gradients in each content of a slice, and of the contents that workers have seen."""

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
        self._members: dict[
            tuple[int, int], tuple[frozenset[Token], set[int]]
        ] = {}  # Tokens, and keys of the slices with them.
        self._answered: dict[int, dict[Token, float]] = {}
        self._reset_at: dict[int, tuple[float, frozenset[Token]]] = {}
        self._begun: dict[int, float] = {}
        self._deaths: dict[str, list[tuple[float, Peer]]] = {"worker": [], "server": []}

    @property
    def highest(self) -> int:
        """The last step that a worker has begun."""
        return max(self._begun, default=-1)

    def begun(self, step: int, now: float) -> None:
        """Note that a worker begins a step."""
        self._begun.setdefault(step, now)

    def died(self, peer: Peer, now: float) -> None:
        """Note that a process has died or counts as dead."""
        self._deaths[peer.role].append((now, peer))

    def made_of(self, key: int, value: Tensor) -> frozenset[Token]:
        """Return the tokens in a content."""
        return self._made_of.get(_content(key, value), (frozenset(), frozenset()))[0]

    def applied(self, key: int, version: int, before: frozenset[Token], update: Tensor | None, options: Options) -> Any:
        """Check an update before a server applies it, and return the tokens for :meth:`became`, which follows."""
        tokens = self._tokens(update, version)
        twice = tokens & before
        if twice:
            raise ViolationError(1, f"slice {key} holds {sorted(twice)} twice from version {version + 1} on")
        if self.aggregates and any(step != version for _, step, _ in tokens):
            raise ViolationError(2, f"version {version + 1} of slice {key} is made of {sorted(tokens)}")
        if any(options[0]["lr"] != rate(step) for _, step, _ in tokens):
            raise ViolationError(4, f"{sorted(tokens)} of slice {key} are applied with another step's learning rate")
        return before | tokens, tokens

    def _tokens(self, update: Tensor | None, version: int) -> frozenset[Token]:
        values = [] if update is None else update.view(-1).tolist()
        members = [worker for worker, value in enumerate(values) if value]
        if self.clipped:
            return frozenset((worker, version, 0) for worker in members)
        share = len(members) if self.aggregates else 1
        numbers = {worker: round(INCARNATIONS * (values[worker] * share - 1)) for worker in members}
        return frozenset((worker, number // INCARNATIONS, number % INCARNATIONS) for worker, number in numbers.items())

    def based_on(self, key: int, version: int, value: Tensor, state: Tensor | None) -> None:
        """Check that a server has the optimizer's state that belongs to a content before it applies an update."""
        states = self._states.get(_content(key, value))
        if states is not None and _content(key, state) not in states:
            raise ViolationError(14, f"version {version} of slice {key} has the optimizer's state of another")

    def became(self, key: int, value: Tensor, made_of: Any, state: Tensor | None) -> None:
        """Note a server's new content, and the optimizer's state that belongs to it."""
        content = _content(key, value)
        self._made_of[content] = made_of
        self._states.setdefault(content, set()).add(_content(key, state))

    def sent(self, key: int, known: Tensor, value: Tensor) -> None:
        """Note the values that workers will have after a change. A change leaves something out; the next adds it."""
        self._made_of[_content(key, known)] = self._made_of[_content(key, value)]

    # Values that workers see

    def received(
        self, worker: Peer, header: Header, value: Tensor, whole: bool, server: Peer, sent: float, now: float
    ) -> None:
        """Check a content that a worker receives.

        Args:
            value: The content.
            whole: Whether the worker has asked for the current values instead of the values of a step.
            sent: Time at which the server sent the content.
        """
        key, version = header.key, header.base
        if any(peer[:3] == worker[:3] for _, peer in self._deaths["worker"]):
            return  # The worker counts as dead and ends when it hears of it. The values that it takes do no harm.
        content = value.view(-1).numpy().tobytes()
        epoch = self._epochs.get(key, 0)
        kind = (whole or header.weight == ALONE) and self._changes  # Other pulls in such a run may leave something out.
        seen = self._visible.setdefault((epoch, key, version, kind), content)
        tokens, last = self._made_of.get((key, content), (None, frozenset()))
        forgiven = header.step - 1 <= self._forgiven.get(key, -1)
        if self.aggregates and seen != content and not forgiven:
            raise ViolationError(5, f"version {version} of slice {key} has two contents")
        if tokens is None:
            if not forgiven and version > 0:
                raise ViolationError(4, f"version {version} of slice {key} at {worker} is not the result of an update")
            return
        missing = {token for token, at in self._answered.get(key, {}).items() if at < sent} - tokens
        # In modes without common steps a worker may receive old values if neither the worker nor the server knows yet
        # that the server was replaced.
        may_lag = not whole and not self.aggregates and any(peer == server for _, peer in self._deaths["server"])
        if missing and not forgiven and not may_lag:
            raise ViolationError(6, f"slice {key} lacks {sorted(missing)}, which were answered, in version {version}")
        if whole:
            # Current values of common steps have reached all copies. Other current values may not have yet.
            self._seen(key, tokens if self.aggregates else (), server, sent, now)
            return
        own_token = (worker.id, header.step - 1, 0 if self.clipped else worker.incarnation)
        if own_token not in tokens and not forgiven:
            raise ViolationError(2, f"{worker} gets slice {key} without its own push of step {own_token[1]}")
        if self.aggregates and last and not forgiven:
            members, keys = self._members.setdefault((epoch, version), (last, set()))
            keys.add(key)
            if members != last and not self._torn(version - 1, members ^ last):
                raise ViolationError(
                    3, f"step {version - 1} has {sorted(members)} in one slice, {sorted(last)} in {key}"
                )
        self._seen(key, tokens if self.aggregates else {own_token}, server, sent, now)

    def _seen(self, key: int, tokens: Iterable[Token], server: Peer, sent: float, now: float) -> None:
        """Note the tokens of an answer to a worker, unless the answering server has been replaced since."""
        answered, (reset_time, kept) = self._answered.setdefault(key, {}), self._reset_at.get(key, (0.0, frozenset()))
        replaced = sent < reset_time or any(at < reset_time and peer == server for at, peer in self._deaths["server"])
        for token in tokens:
            if not replaced or token in kept:
                answered.setdefault(token, now)

    def _torn(self, step: int, tokens: Iterable[Token]) -> bool:
        """Whether tokens may be in some slices only: their workers have died, and a server with some of their pushes.

        With pipelined steps the workers' deaths are enough, because the workers had not pushed all slices.
        """
        since = self._begun.get(step, 0.0)
        workers = {peer.id for at, peer in self._deaths["worker"] if at >= since - HEARD}
        lost = self._pipelined or any(at >= since for at, _ in self._deaths["server"])
        return lost and workers >= {worker for worker, _, _ in tokens}

    def holds_all(self, key: int, value: Tensor) -> bool:
        """Whether a content has all tokens that workers have received in answers."""
        return self._answered.get(key, {}).keys() <= self.made_of(key, value)

    def reset(self, key: int, value: Tensor, now: float) -> None:
        """Note that a slice goes on from initial values, or from a copy that was never filled."""
        kept = self.made_of(key, value)
        self._reset_at[key] = now, kept
        self._answered[key] = {token: at for token, at in self._answered.get(key, {}).items() if token in kept}
        for place, (members, keys) in list(self._members.items()):
            if not members <= kept:
                keys.discard(key)  # The slice has lost this update. The step may be made again with other members.
                if not keys:
                    del self._members[place]
        self._epochs[key] = self._epochs.get(key, 0) + 1
        self._forgiven[key] = self.highest + 1


def _content(key: int, value: Tensor | None) -> Content:
    return key, b"" if value is None else value.view(-1).numpy().tobytes()


class WatchedChanges(Changes):
    """Changes that tell a :class:`Watch` the values that workers have after each change.

    Args:
        ratio: Fraction of the elements that ``topk`` sends.
        whole: Encoding of pulled values where workers do not want changes; None if workers always want changes.
    """

    def __init__(
        self, encoding: int, ratio: float, values: Mapping[int, Tensor], whole: int | None, watch: Watch
    ) -> None:
        super().__init__(encoding, ratio, values, whole)
        self._watch = watch

    def apply(self, key: int, payload: memoryview, change: Tensor | None) -> None:
        """Apply a change and note the values that workers will have."""
        super().apply(key, payload, change)
        if key not in self.behind:
            self._watch.sent(key, self.known[key], self._values[key])


class WatchedStore(Store):
    """A server's store that lets a :class:`Watch` check each update.

    Args:
        late: Whether the server was started again. Initial values that a worker sends to such a server do not copy the
            primary's values, because the primary may not know the server yet.

    Attributes:
        whole: Keys of the slices that have once contained all tokens that workers had received by then.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice], watch: Watch, late: bool) -> None:
        super().__init__(specification, slices)
        self._watch = watch
        self._late = late
        self.whole: set[int] = set()
        if specification.pulls_changes:
            encoding, whole = encodings(specification)
            exact = None if whole is None else Encoding.DENSE  # Two contents could be rounded to the same values.
            self.changes = WatchedChanges(encoding, specification.topk_density, self.values, exact, watch)

    def look(self, keys: Iterable[int]) -> None:
        """Note the slices that contain all tokens that workers have received."""
        for key in keys:
            if key not in self.whole and self._watch.holds_all(key, self.values[key]):
                self.whole.add(key)

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace the values of a slice."""
        super().put(key, value, version)
        if version or not self._late:
            self.look((key,))

    def apply(self, key: int, update: Tensor | None, options: Options, absent: int = 0) -> None:
        """Check an update of a slice and apply it."""
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
