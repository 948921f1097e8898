"""Workers' pushes of common steps. A server keeps the pushes until a step is decided, and then applies their mean."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import PAYLOADS, check_length, decode
from cnnstrategies.paramserver.messages import Encoding, Header, OutdatedMessageError
from cnnstrategies.paramserver.server.decision import Decision, clipping
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import MemberKey, check_absent
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import STEP_GROUP, Options, Specification

# This pair takes the place of a worker's id and incarnation in messages about an update with the mean gradient of a
# common step, because the mean gradient does not come from a single worker.
ALL_MEMBERS = (0xFFFFFFFF, 0)


@dataclass(frozen=True)
class Begin:
    """Contents of a BEGIN message, which a worker sends before its pushes of a step.

    Attributes:
        options: Hyperparameters of the step.
        weight: Number of samples in the worker's gradient.
        pulls: Encoding in which the worker will pull the values after the step, if workers choose encodings; `NOTHING`
            otherwise.
        level: Level of the worker's encodings: 1 for the most exact, larger for smaller payloads; 0 if workers do not
            choose encodings. See :attr:`~cnnstrategies.paramserver.messages.Header.level`.
    """

    options: Options
    weight: float
    pulls: int = Encoding.NOTHING
    level: int = 0


class Pushes:
    """The pushes of one step. Each worker sends one push for each slice.

    The pushes of a worker that dies are kept, because the leader may have decided that the worker is a member of the
    step.

    Attributes:
        begun: By worker: contents of its BEGIN message.
    """

    def __init__(self) -> None:
        self.begun: dict[MemberKey, Begin] = {}
        # By slice key and worker: the encoded gradient, and the number of its encoding.
        self._pieces: dict[int, dict[MemberKey, tuple[memoryview, int]]] = {}
        # By slice key and worker: an integer in which bit i is set if part i of the slice has no gradient in the
        # worker's push.
        self._absent: dict[int, dict[MemberKey, int]] = {}
        self._counts: dict[MemberKey, int] = {}  # By worker: number of slices that the worker has pushed.
        # By slice key: the mean gradient that was computed last, and the workers whose gradients are part of the mean.
        self._means: dict[int, tuple[frozenset[MemberKey], Tensor | None]] = {}

    def add(self, worker: MemberKey, slice_: Slice, payload: memoryview, encoding: int, absent: int = 0) -> bool:
        """Keep a worker's push of a slice until the step is applied to the slice.

        Args:
            worker: Id and incarnation of the worker.
            slice_: The slice.
            payload: The encoded gradient.
            encoding: Encoding of the gradient; `NOTHING` if no part of the slice has a gradient.
            absent: Bit i is set if part i of the slice has no gradient.

        Returns False, without keeping the push, if the worker has pushed the slice before.

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
        """Return the number of slices that a worker has pushed. Return -1 if the worker has not begun the step."""
        return self._counts.get(worker, 0) if worker in self.begun else -1

    def has(self, key: int, workers: Collection[MemberKey]) -> bool:
        """Return whether each of the workers has pushed a slice.

        Args:
            key: Key of the slice.
            workers: Ids and incarnations of the workers.
        """
        return self._pieces.get(key, {}).keys() >= set(workers)

    def has_none(self, key: int) -> bool:
        """Return whether the slice with this key has not been pushed by any worker."""
        return not self._pieces.get(key)

    def mean(self, slice_: Slice, workers: Iterable[MemberKey], buffer: Tensor) -> Tensor | None:
        """Return the mean of the workers' gradients of a slice, weighted by their numbers of samples.

        Workers that have not pushed the slice are left out. If at least one push has a gradient, a push without a
        gradient counts as zeros, as under DDP.

        Args:
            slice_: The slice.
            workers: Ids and incarnations of the workers that take part in the step.
            buffer: Flat tensor, with as many elements as the slice, to which the mean is written. If there is only one
                gradient, the method may return this gradient without a copy to the buffer.

        Returns the mean gradient as a flat tensor. Returns None if no push has a gradient.
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
            fraction = weight / total if total else 1.0
            if mean is not None:
                # `lerp` makes one pass over the mean; a product and a sum would make two.
                mean = torch.lerp(mean, gradient, fraction, out=buffer)
            else:
                mean = gradient if fraction == 1.0 else torch.mul(gradient, fraction, out=buffer)
        self._means[slice_.key] = members, mean
        return mean

    def absent(self, key: int, workers: Iterable[MemberKey]) -> int:
        """Return an integer in which bit i is set if all workers' pushes lack a gradient of part i of a slice.

        Call this only if the mean of the slice is not None.

        Args:
            key: Key of the slice.
            workers: Ids and incarnations of the workers that take part in the step.
        """
        if key not in self._absent:
            return 0
        absent, pieces = -1, self._pieces[key]
        for worker in pieces.keys() & set(workers):
            if pieces[worker][1] != Encoding.NOTHING:
                absent &= self._absent[key].get(worker, 0)
        return max(absent, 0)

    def check_optimizers(self, workers: Sequence[MemberKey], specification: Specification) -> None:
        """Check that all workers make the step with the same one of several optimizers.

        Args:
            workers: Ids and incarnations of workers that have begun the step. At least one.
            specification: The run's specification, in which `clips_each_step` is true.

        Raises:
            ConfigurationError: Two workers make the step with different optimizers.
        """
        groups = {worker: self.begun[worker].options[0][STEP_GROUP] for worker in workers}
        first, number = next(iter(groups.items()))
        for worker, other in groups.items():
            if other != number:
                raise ConfigurationError(
                    f"rank {worker[0]} calls step of {_optimizer_of(specification, other)} while rank {first[0]} calls "
                    f"step of {_optimizer_of(specification, number)}: call the same optimizers in the same order on "
                    "all ranks, by values that are equal on all ranks, such as batch_idx"
                )

    def drop(self, key: int) -> None:
        """Drop all pushes of a slice. Call this when the step was applied to the slice."""
        self._pieces.pop(key, None)
        self._absent.pop(key, None)
        self._means.pop(key, None)


def _optimizer_of(specification: Specification, number: int) -> str:
    """Return words for the optimizer of a parameter group."""
    group = specification.groups[number]
    first = specification.parameters[group.parameters[0]].name if group.parameters else "no parameters"
    return f"{group.optimizer.rpartition('.')[2]} (with {first})"


class Backlog:
    """Workers' pushes of the current step and the next step.

    Attributes:
        steps: By number of the step: the pushes of the step.
        uneven: Whether the slices whose primary is this server have different versions. After another server's death
            this server may become the primary of slices to which the current step is already applied.
    """

    def __init__(self, shard: Shard) -> None:
        self.steps: dict[int, Pushes] = {}
        self.uneven = False
        self._shard = shard

    def lowest(self, default: int) -> int:
        """Return the first step that is not applied yet to all slices whose primary is this server.

        Args:
            default: Result if this server is not the primary of any slice.
        """
        return min((self._shard.store.versions[key] for key in self._shard.own_keys), default=default)

    def pushes_of(self, step: int) -> Pushes:
        """Return the kept pushes of a step. The object is created if no push of the step has arrived yet."""
        return self.steps.setdefault(step, Pushes())

    def add(self, worker: MemberKey, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push.

        Args:
            worker: Id and incarnation of the worker.
            header: Header of the PUSH message.
            payload: The encoded gradient.

        Returns False for a push that has arrived before, or whose step is already applied to the slice.

        Raises:
            InvalidMessageError: The worker's BEGIN message of the step has not arrived, or the push does not fit the
                slice.
        """
        key, step = header.key, header.step
        version = self._shard.store.versions[key]
        if version > step:
            return False
        if version < 0 or step > version + 1 or step not in self.steps or worker not in self.steps[step].begun:
            raise OutdatedMessageError("the push is for a step that has not begun on this server")
        return self.steps[step].add(worker, self._shard.store.slices[key], payload, header.encoding, header.base)

    def has(self, worker: MemberKey, step: int, key: int) -> bool:
        """Return whether a worker's push of a slice in a step has arrived and is still kept."""
        return step in self.steps and self.steps[step].has(key, (worker,))

    def complete(self, step: int, worker: MemberKey) -> bool:
        """Return whether a worker's pushes of a step are complete on this server.

        The server needs a push for each slice to which it must still apply the step.
        """
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
        """Yield a step and a worker for each BEGIN message that has arrived and is still kept."""
        for step, pushes in self.steps.items():
            for worker in pushes.begun:
                yield step, worker

    def all_complete(self) -> Iterator[tuple[int, MemberKey]]:
        """Return an iterator over pairs of a step and a worker whose pushes of this step are complete."""
        return ((step, worker) for step, worker in self.all_begun() if self.complete(step, worker))

    def compare_versions(self) -> None:
        """Update :attr:`uneven`. Call this after a new view, and after a step was applied to all slices."""
        self.uneven = len({self._shard.store.versions[key] for key in self._shard.own_keys}) > 1

    def forget_before(self, step: int) -> None:
        """Drop the pushes of all steps with a number below `step`."""
        for earlier_step in [known_step for known_step in self.steps if known_step < step]:
            del self.steps[earlier_step]


class Updater:
    """Executor of the decided step. For one slice after another, it computes and applies the slice's mean gradient.

    The slices are updated in the order in which the workers use them.

    Attributes:
        finished: Number of steps that are applied to all slices whose primary is this server.
    """

    def __init__(self, specification: Specification, shard: Shard, backlog: Backlog) -> None:
        self.finished = 0
        self._specification = specification
        self._may_choose = "auto" in (specification.compression, specification.pull_compression)
        self._shard = shard
        self._backlog = backlog
        self._is_joint = specification.is_joint
        clips = specification.clips_each_step or specification.clip_norm is not None
        self._keeps_means = clips or specification.is_joint
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        # Keys of the slices that are ready to be updated, because all pushes that the decided step needs have arrived.
        self._todo: deque[int] = deque()
        # Keys of the slices that are not ready, because a push that the decided step needs is missing.
        self._waiting: set[int] = set()
        self._members: tuple[MemberKey, ...] = ()  # workers whose pushes make up the step, dead workers included
        self._live_members: Collection[MemberKey] = ()  # live members, whose missing pushes will still arrive
        # Whether all members are dead. A slice is then ready only after at least one other worker has pushed the slice.
        self._waits_for_any = False

    def plan(
        self, decision: Decision | None, live_members: Collection[MemberKey], successors: Collection[MemberKey]
    ) -> None:
        """Determine the slices to which the decided step must still be applied.

        Args:
            decision: The decision about the step; None before the first decision.
            live_members: Ids and incarnations of the step's live members.
            successors: Ids and incarnations of other workers whose pushes also count, because all members are dead; see
                :attr:`.Synchronous._waits_for_successors`.
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
        """Act on the arrival of a push of the decided step.

        If no push of the slice is missing any more, the slice becomes ready for :meth:`work`.

        Args:
            key: Key of the slice.
            step: Number of the step.
        """
        if key in self._waiting and self._has_needed(self._backlog.pushes_of(step), key):
            self._waiting.discard(key)
            self._todo.append(key)

    def _has_needed(self, pushes: Pushes, key: int) -> bool:
        """Return whether the pushes that the decided step needs for a slice have all arrived."""
        return pushes.has(key, self._live_members) and not (self._waits_for_any and pushes.has_none(key))

    @property
    def busy(self) -> bool:
        """Whether at least one slice of the decided step is ready for :meth:`work`."""
        return bool(self._todo) and not (self._is_joint and self._waiting)

    def work(self, decision: Decision) -> None:
        """Compute the mean gradient of the next slice, and update the slice if the clipping factor is known.

        If the optimizer makes the steps of all parameters together, do so for all slices.
        """
        keys = list(self._todo) if self._is_joint else [self._todo[0]]
        for _ in keys:
            self._todo.popleft()
        pushes = self._backlog.pushes_of(decision.step)
        means = {key: self._mean(pushes, key, self._members) for key in sorted(keys)}
        if decision.scale is None:
            return
        _, clip_value = clipping(self._specification, decision.options)
        for mean in means.values():
            if mean is not None and clip_value is not None:
                mean.clamp_(-clip_value, clip_value)
            if mean is not None and decision.scale != 1.0:
                mean.mul_(decision.scale)
        chosen = (
            [pushes.begun[member] for member in decision.members if member in pushes.begun] if self._may_choose else []
        )
        pulls, level = frozenset(begin.pulls for begin in chosen), chosen[0].level if chosen else 0
        updates = {key: (mean, pushes.absent(key, self._members)) for key, mean in means.items()}
        self._shard.update(updates, decision.options, ALL_MEMBERS, decision.step, pulls, level)
        for key in keys:
            pushes.drop(key)
        if not self._todo and not self._waiting:
            self.finished = self._backlog.lowest(decision.step)
            self._backlog.compare_versions()

    def squared_norm(self, decision: Decision) -> float | None:
        """Return the squared L2 norm of the mean gradient in the slices whose primary is this server.

        The norms of the slices are computed in float64. Return None as long as a live member's push is missing.
        """
        pushes = self._backlog.pushes_of(decision.step)
        keys = [key for key in self._shard.own_keys if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, self._live_members) for key in keys):
            return None
        means = [self._mean(pushes, key, decision.members) for key in keys]
        norms = [torch.linalg.vector_norm(mean, dtype=torch.float64).item() for mean in means if mean is not None]
        return float(sum(norm * norm for norm in norms))

    def _mean(self, pushes: Pushes, key: int, members: Sequence[MemberKey]) -> Tensor | None:
        """Return the mean gradient of a slice. Return None if no push of the slice has a gradient.

        The pushes of one slice are added one after the other, because the mean then stays in the CPU's cache. All
        slices with the same dtype use the same buffer, one after the other. With clipping by the global norm each slice
        has its own buffer, because the slice's mean is needed again once the clipping factor is known. Slices that are
        updated together also have their own buffers.
        """
        slice_ = self._shard.store.slices[key]
        buffer_key = key if self._keeps_means else slice_.dtype
        buffer = self._buffers.get(buffer_key)
        if buffer is None or buffer.numel() < slice_.numel:
            buffer = self._buffers[buffer_key] = torch.empty(slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[: slice_.numel])
