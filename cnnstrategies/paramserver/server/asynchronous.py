"""Updates that are applied as they arrive: the modes async, and ssp with staleness."""

from collections.abc import Collection

from cnnstrategies.paramserver.compression import check_length, decode
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError
from cnnstrategies.paramserver.server.clocks import RollCall, StaleClock
from cnnstrategies.paramserver.server.pushes import Begin
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import MemberKey, check_absent
from cnnstrategies.paramserver.specification import Specification


class Asynchronous:
    """One server's part in steps that each worker makes independently of the others.

    Attributes:
        clock: The number of steps that each worker has finished.
        roll: The workers whose step this server does not know yet.
        updates: Number of updates applied to this server's own slices.
    """

    def __init__(self, specification: Specification, shard: Shard) -> None:
        self.clock = StaleClock(specification.staleness if specification.mode == "ssp" else None, specification.workers)
        self.roll = RollCall(specification.workers)  # A server that starts later than the workers waits for them.
        self._free = specification.mode == "async"
        self.updates = 0
        self._shard = shard
        self._begun: dict[int, tuple[int, Begin]] = {}
        self._first: dict[MemberKey, int] = {}  # first step of each worker
        self._held: dict[int, tuple[list[int], Pull]] = {}

    @property
    def finished(self) -> int:
        """The number of updates that every own slice has had on average, rounded down."""
        return self.updates // max(1, len(self._shard.own_keys))

    @property
    def entries(self) -> int:
        """The number of workers about which this server keeps anything."""
        return len(self._begun.keys() | self._held.keys())

    def follow(self, view: View) -> None:
        """Stop waiting for workers that are no longer in the view."""
        incarnations = view.incarnations
        for worker in self.roll.follow(incarnations):
            self.leave(worker)
            self._begun.pop(worker, None)
        self._first = {member: step for member, step in self._first.items() if incarnations.get(member[0]) == member[1]}
        self.proceed()

    def join(self, worker: int, step: int | None) -> int | None:
        """Count a worker from now on; :meth:`note_position` must be called next.

        Args:
            step: Number of steps that the worker has finished; None for a newcomer.

        Returns the worker's clock. Returns None for a newcomer, which is then not counted, while this server does not
        know the steps of all other workers.
        """
        if step is None and not (self._free or self.roll.complete):
            return None
        if step and self.clock.expects and self.roll.complete:
            # The run has begun. This server may replace another one, and then knows only some of the members.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known - {worker})
        return self.clock.join(worker, step)

    def note_first_step(self, member: MemberKey, first: int) -> None:
        """Note the step with which a worker began: every push since that step must be here."""
        self._first[member] = first

    def note_position(self, worker: int) -> None:
        """Note that a worker has reported its step, or that it is not a member."""
        self.roll.note_position(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Stop counting a worker."""
        self.clock.leave(worker)
        self._held.pop(worker, None)
        self.proceed()

    def begin(self, member: MemberKey, step: int, begin: Begin) -> None:
        """Note the hyper-parameters of a step; the worker's pushes of the step follow."""
        self._begun[member[0]] = step, begin

    def push(self, member: tuple[int, int], header: Header, payload: memoryview) -> bool:
        """Apply a worker's gradient. Return whether the push is new.

        Raises:
            InvalidMessageError: The push does not fit its slice, or the worker has not begun the step here.
        """
        key, store = header.key, self._shard.store
        slice_ = store.slices[key]
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        check_absent(header.base, slice_)
        step, begin = self._begun.get(member[0], (-1, None))
        if begin is None or step != header.step or store.versions[key] < 0:
            raise InvalidMessageError("a push of a step that has not begun")
        last = store.seen[key].get(member)
        if last is not None and last >= step:
            return False
        if step != self._first.get(member) and (last is None or step > last + 1):  # The values here may lack updates.
            raise InvalidMessageError("a push of a worker that has not reported its first step")
        gradient = None
        if header.encoding != Encoding.NOTHING:
            gradient = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        self._shard.update(key, gradient, begin.options, member, step, header.base)
        self.updates += 1
        return True

    def pull(self, member: tuple[int, int], keys: list[int], request: int, encoding: int) -> None:
        """Note that a worker has finished `request` steps, and keep its pull until the worker may begin the next step.

        The answer contains the worker's own pushes.
        """
        slowest = self.clock.slowest
        self.clock.finished(member[0], request)
        self._held[member[0]] = keys, Pull(request, member=member, step=request - 1, encoding=encoding)
        # The other workers wait for the slowest one: as long as the slowest has not moved, only this worker can go on.
        self.proceed(self._held if self.clock.slowest != slowest else (member[0],))

    def will_answer(self, key: int, member: tuple[int, int], request: int) -> bool:
        """Whether this server will answer a worker's pull of an own slice although the worker sends nothing again."""
        keys, waiting_pull = self._held.get(member[0], ([], None))
        pull = None
        if waiting_pull is not None and waiting_pull.request == request and key in keys:
            pull = waiting_pull
        pull = pull or self._shard.pull_of(key, member[0], request)
        return pull is not None and (pull.member is None or self._shard.store.seen[key].get(member, -1) >= pull.step)

    def proceed(self, workers: Collection[int] | None = None) -> None:
        """Answer the waiting pulls of the given workers, or of all workers, as far as the workers may go on."""
        if not (self._free or self.roll.complete):
            return
        for worker in list(self._held if workers is None else workers):
            keys, pull = self._held[worker]
            if self.clock.may_start(pull.request):
                del self._held[worker]
                self._shard.pull(worker, keys, pull)
