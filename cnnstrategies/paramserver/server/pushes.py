"""Workers' pushes of steps that are not applied yet, their mean over all samples, and its application."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import PAYLOADS, check_length, decode
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import MemberKey, check_absent
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Options, Specification

ALL_MEMBERS = (0xFFFFFFFF, 0)  # sender of an update that is the mean of a step


@dataclass(frozen=True)
class Begin:
    """The announcement that precedes a worker's pushes of a step.

    Attributes:
        options: Hyper-parameters of the step.
        weight: Number of samples of the worker's gradient.
        pulls: Encoding in which the worker will pull the step's result, where workers may choose.
        level: See :attr:`~cnnstrategies.paramserver.messages.Header.level`.
    """

    options: Options
    weight: float
    pulls: int = Encoding.NOTHING
    level: int = 0


class Pushes:
    """Pushes of one step: one message of each worker for each slice.

    The pushes of a worker that dies stay: the leader may have decided that the worker takes part.

    Attributes:
        begun: What each worker has announced with its BEGIN message.
    """

    def __init__(self) -> None:
        self.begun: dict[MemberKey, Begin] = {}
        self._pieces: dict[int, dict[MemberKey, tuple[memoryview, int]]] = {}
        self._absent: dict[int, dict[MemberKey, int]] = {}  # by key: parts without gradient in a worker's push, as bits
        self._counts: dict[MemberKey, int] = {}
        self._means: dict[int, tuple[frozenset[MemberKey], Tensor | None]] = {}

    def add(self, worker: MemberKey, slice_: Slice, payload: memoryview, encoding: int, absent: int = 0) -> bool:
        """Keep a push. Return whether it is the worker's first push of the slice.

        Raises:
            InvalidMessageError: The push does not fit the slice.
        """
        check_length(len(payload), encoding, slice_.numel, slice_.dtype)
        check_absent(absent, slice_)
        pieces = self._pieces.setdefault(slice_.key, {})
        if worker in pieces:
            return False
        if encoding != Encoding.NOTHING:
            PAYLOADS[encoding].check(payload, slice_.numel)
        pieces[worker] = payload, encoding
        if absent:
            self._absent.setdefault(slice_.key, {})[worker] = absent
        self._counts[worker] = self._counts.get(worker, 0) + 1
        return True

    def count(self, worker: MemberKey) -> int:
        """Return the number of slices that a worker has pushed; -1 before it began the step."""
        return self._counts.get(worker, 0) if worker in self.begun else -1

    def has(self, key: int, workers: Collection[MemberKey]) -> bool:
        """Whether all given workers have pushed a slice."""
        return self._pieces.get(key, {}).keys() >= set(workers)

    def has_none(self, key: int) -> bool:
        """Whether no worker has pushed a slice."""
        return not self._pieces.get(key)

    def mean(self, slice_: Slice, workers: Iterable[MemberKey], buffer: Tensor) -> Tensor | None:
        """Return the mean over all samples of the workers' gradients; None if none of them has a gradient.

        A worker without a gradient counts as zeros if another worker has one, as under DDP. Of `workers`, the members
        of the step, only those that pushed the slice count.

        Args:
            buffer: Flat memory for the mean. If the mean is one worker's gradient, that gradient is returned from its
                own memory instead.
        """
        pieces = self._pieces.get(slice_.key, {})
        members = frozenset(workers).intersection(pieces)
        known = self._means.get(slice_.key)
        if known is not None and known[0] == members:
            return known[1]
        mean: Tensor | None = None
        total = 0.0
        for worker in sorted(members):
            payload, encoding = pieces[worker]
            weight = self.begun[worker].weight
            total += weight
            if encoding == Encoding.NOTHING:
                if mean is not None and total:
                    mean = torch.mul(mean, (total - weight) / total, out=buffer)
                continue
            gradient = decode(payload, encoding, slice_.numel, slice_.dtype)
            share = weight / total if total else 1.0
            if mean is not None:
                mean = torch.lerp(mean, gradient, share, out=buffer)  # one pass over the memory per worker
            else:
                mean = gradient if share == 1.0 else torch.mul(gradient, share, out=buffer)
        self._means[slice_.key] = members, mean
        return mean

    def absent(self, key: int, workers: Iterable[MemberKey]) -> int:
        """Return the parts of a slice for which no worker has a gradient, as bits, if the mean is not None."""
        if key not in self._absent:
            return 0
        absent, pieces = -1, self._pieces[key]
        for worker in pieces.keys() & set(workers):
            if pieces[worker][1] != Encoding.NOTHING:
                absent &= self._absent[key].get(worker, 0)
        return max(absent, 0)

    def drop(self, key: int) -> None:
        """Drop the pushes of a slice that has been applied."""
        self._pieces.pop(key, None)
        self._absent.pop(key, None)
        self._means.pop(key, None)


class Backlog:
    """Workers' pushes of the present step and the next one.

    Attributes:
        steps: The pushes by step.
        uneven: Whether the present step is applied to only some of the own slices, as can happen after a server's
            death.
    """

    def __init__(self, shard: Shard) -> None:
        self.steps: dict[int, Pushes] = {}
        self.uneven = False
        self._shard = shard

    def lowest(self, default: int) -> int:
        """Return the first step that is not applied to all own slices; without own slices the default."""
        return min((self._shard.store.versions[key] for key in self._shard.own_keys), default=default)

    def pushes_of(self, step: int) -> Pushes:
        """Return the pushes of a step."""
        return self.steps.setdefault(step, Pushes())

    def add(self, worker: MemberKey, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push. Return whether it is new.

        Raises:
            InvalidMessageError: The worker has not begun the step here, or the push does not fit the slice.
        """
        key, step = header.key, header.step
        version = self._shard.store.versions[key]
        if version > step:
            return False
        if version < 0 or step > version + 1 or step not in self.steps or worker not in self.steps[step].begun:
            raise InvalidMessageError("a push of a step that has not begun")
        return self.steps[step].add(worker, self._shard.store.slices[key], payload, header.encoding, header.base)

    def has(self, worker: MemberKey, step: int, key: int) -> bool:
        """Whether a worker's push of a slice has arrived."""
        return step in self.steps and self.steps[step].has(key, (worker,))

    def complete(self, step: int, worker: MemberKey) -> bool:
        """Whether all pushes of a worker for a step have arrived, as far as this server still needs them."""
        pushes = self.steps[step]
        if pushes.count(worker) == len(self._shard.own_keys):
            return True
        versions = self._shard.store.versions
        return (
            self.uneven
            and worker in pushes.begun
            and all(versions[key] > step or pushes.has(key, (worker,)) for key in self._shard.own_keys)
        )

    def all_begun(self) -> Iterator[tuple[int, MemberKey]]:
        """Yield each step with each worker that has begun it."""
        for step, pushes in self.steps.items():
            for worker in pushes.begun:
                yield step, worker

    def all_complete(self) -> Iterator[tuple[int, MemberKey]]:
        """Return each step with each worker whose pushes of that step are complete."""
        return ((step, worker) for step, worker in self.all_begun() if self.complete(step, worker))

    def compare_versions(self) -> None:
        """Find out after a change of the view whether the own slices have different versions."""
        self.uneven = len({self._shard.store.versions[key] for key in self._shard.own_keys}) > 1

    def forget_before(self, step: int) -> None:
        """Drop the pushes of earlier steps."""
        for earlier_step in [known_step for known_step in self.steps if known_step < step]:
            del self.steps[earlier_step]


class Updater:
    """Computation of the decided step's means and their application, slice by slice, in the order of the slices' use.

    Attributes:
        finished: Number of steps that are applied to all own slices.
    """

    def __init__(self, specification: Specification, shard: Shard, backlog: Backlog) -> None:
        self.finished = 0
        self._clip_value = specification.clip_value
        self._may_choose = "auto" in (specification.compression, specification.pull_compression)
        self._shard = shard
        self._backlog = backlog
        self._keeps_means = specification.clip_norm is not None
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        self._todo: deque[int] = deque()
        self._waiting: set[int] = set()  # keys of slices that lack pushes of the decided step
        self._members: tuple[MemberKey, ...] = ()  # workers whose pushes take part
        self._live_members: Collection[MemberKey] = ()  # live members, whose pushes will arrive
        self._waits_for_any = False  # whether a slice without any push also waits for one

    def plan(
        self, decision: Decision | None, live_members: Collection[MemberKey], successors: Collection[MemberKey]
    ) -> None:
        """List the slices to which the decided step is still to be applied.

        Args:
            decision: The decided step, if there is one.
            live_members: The live members of the step.
            successors: Workers that may push a slice that no member has pushed.
        """
        self._todo = deque()
        self._waiting = set()
        if decision is None:
            return
        self._members, self._live_members, self._waits_for_any = (
            (*decision.members, *successors),
            live_members,
            bool(successors),
        )
        self._waiting = {key for key in self._shard.own_keys if self._shard.store.versions[key] == decision.step}
        for key in self._shard.own_keys:
            self.note_push(key, decision.step)

    def note_push(self, key: int, step: int) -> None:
        """Note that a push of the decided step has arrived for a slice."""
        if key in self._waiting and self._has_needed(self._backlog.pushes_of(step), key):
            self._waiting.discard(key)
            self._todo.append(key)

    def _has_needed(self, pushes: Pushes, key: int) -> bool:
        """Whether all pushes that a slice waits for have arrived."""
        return pushes.has(key, self._live_members) and not (self._waits_for_any and pushes.has_none(key))

    @property
    def busy(self) -> bool:
        """Whether slices are left to work on."""
        return bool(self._todo)

    def work(self, decision: Decision) -> None:
        """Compute the mean of the next slice, and apply it if the step's factor is known."""
        key = self._todo.popleft()
        pushes = self._backlog.pushes_of(decision.step)
        mean = self._mean(pushes, key, self._members)
        if decision.scale is None:
            return
        if mean is not None and self._clip_value is not None:
            mean.clamp_(-self._clip_value, self._clip_value)
        if mean is not None and decision.scale != 1.0:
            mean.mul_(decision.scale)
        absent = pushes.absent(key, self._members)
        chosen = (
            [pushes.begun[member] for member in decision.members if member in pushes.begun] if self._may_choose else []
        )
        pulls, level = frozenset(begin.pulls for begin in chosen), chosen[0].level if chosen else 0
        self._shard.update(key, mean, decision.options, ALL_MEMBERS, decision.step, absent, pulls, level)
        pushes.drop(key)
        if not self._todo and not self._waiting:
            self.finished = self._backlog.lowest(decision.step)
            self._backlog.compare_versions()

    def squared_norm(self, decision: Decision) -> float | None:
        """Return the squared norm, in float64, of this server's part of the mean gradient.

        The result is None while a push is missing.
        """
        pushes = self._backlog.pushes_of(decision.step)
        keys = [key for key in self._shard.own_keys if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, self._live_members) for key in keys):
            return None
        means = [self._mean(pushes, key, decision.members) for key in keys]
        norms = [torch.linalg.vector_norm(mean, dtype=torch.float64).item() for mean in means if mean is not None]
        return float(sum(norm * norm for norm in norms))

    def _mean(self, pushes: Pushes, key: int, members: Sequence[MemberKey]) -> Tensor | None:
        """Return the mean of a slice.

        All workers' pushes of the slice are added at once, while it is in the processor's cache. Slices with the same
        dtype share one buffer, unless their means are needed again for clipping.
        """
        slice_ = self._shard.store.slices[key]
        buffer_key = key if self._keeps_means else slice_.dtype
        buffer = self._buffers.get(buffer_key)
        if buffer is None or buffer.numel() < slice_.numel:
            buffer = self._buffers[buffer_key] = torch.empty(slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[: slice_.numel])
