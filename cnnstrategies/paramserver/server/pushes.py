"""What workers have pushed of steps that are not applied yet, its mean over all samples, and how that is applied."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import PAYLOADS, check_length, decode
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import Who, check_absent
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Options, Specification

EVERYBODY = (0xFFFFFFFF, 0)  # whose update the mean of a step is


@dataclass(frozen=True)
class Begin:
    """What comes before a worker's pushes of a step.

    Attributes:
        weight: Of its gradient.
        pulls: In which encoding it will pull what comes of the step, where workers may choose.
        rung: See :attr:`~cnnstrategies.paramserver.messages.Header.rung`.
    """

    options: Options
    weight: float
    pulls: int = Encoding.NOTHING
    level: int = 0


class Pushes:
    """The pushes of one step, a message of each worker for each slice.

    What one of the `begun` that dies has pushed stays: the leader may have decided that it takes part.
    """

    def __init__(self) -> None:
        self.begun: dict[Who, Begin] = {}
        self._pieces: dict[int, dict[Who, tuple[memoryview, int]]] = {}
        self._absent: dict[int, dict[Who, int]] = {}  # where a push lacks the gradients of some parts
        self._counts: dict[Who, int] = {}
        self._means: dict[int, tuple[frozenset[Who], Tensor | None]] = {}

    def add(self, worker: Who, slice_: Slice, payload: memoryview, encoding: int, absent: int = 0) -> bool:
        """Keep a push; whether it is the first of its worker for its slice."""
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

    def count(self, worker: Who) -> int:
        """Slices that a worker has pushed; -1 before it began."""
        return self._counts.get(worker, 0) if worker in self.begun else -1

    def has(self, key: int, workers: Collection[Who]) -> bool:
        """Whether all these workers have pushed a slice."""
        return self._pieces.get(key, {}).keys() >= set(workers)

    def lacks(self, key: int) -> bool:
        """Whether nobody has pushed a slice."""
        return not self._pieces.get(key)

    def mean(self, slice_: Slice, workers: Iterable[Who], buffer: Tensor) -> Tensor | None:
        """The mean over all samples of the workers' gradients; None if none of them has one.

        A worker without a gradient counts as zeros if another has one, as under DDP. Of `workers`, who make up a step,
        only those who pushed the slice count. The mean is written to the flat `buffer`, unless it is one worker's
        gradient, which stays where it is.
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
                mean = torch.lerp(mean, gradient, share, out=buffer)  # one pass over the memory for each worker
            else:
                mean = gradient if share == 1.0 else torch.mul(gradient, share, out=buffer)
        self._means[slice_.key] = members, mean
        return mean

    def absent(self, key: int, workers: Iterable[Who]) -> int:
        """The parts of a slice of which none of the workers has a gradient, as bits; where the mean is not None."""
        if key not in self._absent:
            return 0
        lacking, pieces = -1, self._pieces[key]
        for worker in pieces.keys() & set(workers):
            if pieces[worker][1] != Encoding.NOTHING:
                lacking &= self._absent[key].get(worker, 0)
        return max(lacking, 0)

    def drop(self, key: int) -> None:
        """Forget a slice that has been applied."""
        self._pieces.pop(key, None)
        self._absent.pop(key, None)
        self._means.pop(key, None)


class Backlog:
    """The workers' pushes of the present step and the next."""

    def __init__(self, shard: Shard) -> None:
        self.steps: dict[int, Pushes] = {}
        self.uneven = False  # Some own slices have had the present step and others not, after a server's death.
        self._shard = shard

    def lowest(self, default: int) -> int:
        """The first step that is not applied to all own slices; without own slices the default."""
        return min((self._shard.store.versions[key] for key in self._shard.own), default=default)

    def of(self, step: int) -> Pushes:
        """The pushes of a step."""
        return self.steps.setdefault(step, Pushes())

    def add(self, worker: Who, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push; whether it is new."""
        key, step = header.key, header.step
        version = self._shard.store.versions[key]
        if version > step:
            return False
        if version < 0 or step > version + 1 or step not in self.steps or worker not in self.steps[step].begun:
            raise InvalidMessageError("a push of a step that has not begun")
        return self.steps[step].add(worker, self._shard.store.slices[key], payload, header.encoding, header.base)

    def has(self, worker: Who, step: int, key: int) -> bool:
        """Whether a worker's push of a slice is here."""
        return step in self.steps and self.steps[step].has(key, (worker,))

    def complete(self, step: int, worker: Who) -> bool:
        """Whether a worker's pushes of a step are all here that this server has a use for."""
        pushes = self.steps[step]
        if pushes.count(worker) == len(self._shard.own):
            return True
        versions = self._shard.store.versions
        return (
            self.uneven
            and worker in pushes.begun
            and all(versions[key] > step or pushes.has(key, (worker,)) for key in self._shard.own)
        )

    def all_begun(self) -> Iterator[tuple[int, Who]]:
        """Steps with workers that have begun them."""
        for step, pushes in self.steps.items():
            for worker in pushes.begun:
                yield step, worker

    def all_complete(self) -> Iterator[tuple[int, Who]]:
        """Steps with workers whose pushes of that step are all here."""
        return ((step, worker) for step, worker in self.all_begun() if self.complete(step, worker))

    def compare(self) -> None:
        """After a change of the view: look whether the own slices have had the same steps."""
        self.uneven = len({self._shard.store.versions[key] for key in self._shard.own}) > 1

    def forget_before(self, step: int) -> None:
        """Drop the pushes of earlier steps."""
        for old in [old for old in self.steps if old < step]:
            del self.steps[old]


class Updater:
    """Forms the means of the decided step and applies them, slice by slice, in the order of the slices' use.

    Attributes:
        finished: Steps that are applied to all own slices.
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
        self._waiting: set[int] = set()  # slices that lack pushes of the decided step
        self._members: tuple[Who, ...] = ()  # whose pushes take part
        self._present: Collection[Who] = ()  # the members whose pushes are waited for
        self._heirs = False  # What nobody has pushed is waited for, too.

    def plan(self, decision: Decision | None, present: Collection[Who], heirs: Collection[Who]) -> None:
        """List the slices that the decided step is still to be applied to; `heirs` may push what nobody has pushed."""
        self._todo = deque()
        self._waiting = set()
        if decision is None:
            return
        self._members, self._present, self._heirs = (*decision.who, *heirs), present, bool(heirs)
        self._waiting = {key for key in self._shard.own if self._shard.store.versions[key] == decision.step}
        for key in self._shard.own:
            self.came(key, decision.step)

    def came(self, key: int, step: int) -> None:
        """A push of the decided step has come for a slice."""
        if key in self._waiting and self._has(self._backlog.of(step), key):
            self._waiting.discard(key)
            self._todo.append(key)

    def _has(self, pushes: Pushes, key: int) -> bool:
        """Whether the pushes of a slice are here that it waits for."""
        return pushes.has(key, self._present) and not (self._heirs and pushes.lacks(key))

    @property
    def busy(self) -> bool:
        """Whether slices are left to be worked on."""
        return bool(self._todo)

    def work(self, decision: Decision) -> None:
        """Form the mean of the next slice, and apply it if the step's factor is known."""
        key = self._todo.popleft()
        pushes = self._backlog.of(decision.step)
        mean = self._mean(pushes, key, self._members)
        if decision.scale is None:
            return
        if mean is not None and self._clip_value is not None:
            mean.clamp_(-self._clip_value, self._clip_value)
        if mean is not None and decision.scale != 1.0:
            mean.mul_(decision.scale)
        absent = pushes.absent(key, self._members)
        chosen = [pushes.begun[one] for one in decision.who if one in pushes.begun] if self._may_choose else []
        pulls, level = frozenset(begin.pulls for begin in chosen), chosen[0].level if chosen else 0
        self._shard.update(key, mean, decision.options, EVERYBODY, decision.step, absent, pulls, level)
        pushes.drop(key)
        if not self._todo and not self._waiting:
            self.finished = self._backlog.lowest(decision.step)
            self._backlog.compare()

    def squared_norm(self, decision: Decision) -> float | None:
        """The squared norm, in float64, of this server's part of the mean; None while a push is missing."""
        pushes = self._backlog.of(decision.step)
        keys = [key for key in self._shard.own if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, self._present) for key in keys):
            return None
        means = [self._mean(pushes, key, decision.who) for key in keys]
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64).item() for one in means if one is not None]
        return float(sum(norm * norm for norm in norms))

    def _mean(self, pushes: Pushes, key: int, members: Sequence[Who]) -> Tensor | None:
        """The mean of a slice: of all its workers' pushes at once, while it is in the processor's cache.

        Slices of a type share one buffer, unless the means are needed again, to be clipped.
        """
        slice_ = self._shard.store.slices[key]
        place = key if self._keeps_means else slice_.dtype
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < slice_.numel:
            buffer = self._buffers[place] = torch.empty(slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[: slice_.numel])
