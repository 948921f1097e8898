"""Gradients that are applied as soon as they arrive: the modes async, and ssp with a staleness above 0."""

from collections.abc import Collection

from cnnstrategies.paramserver.compression import check_length, decode
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import Encoding, Header, OutdatedMessageError
from cnnstrategies.paramserver.server.decision import RollCall
from cnnstrategies.paramserver.server.pushes import Begin
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import MemberKey, check_absent
from cnnstrategies.paramserver.specification import Specification


class Asynchronous:
    """A server's state machine in the modes in which each worker makes its steps on its own.

    These modes are async, and ssp with a staleness above 0.

    Attributes:
        clock: The clock that counts the steps that each worker has finished.
        roll: The roll call: a server that starts late waits until every worker has reported its number of steps.
        updates: Number of pushes that this server has applied to slices whose primary is this server.
    """

    def __init__(self, specification: Specification, shard: Shard) -> None:
        self.clock = StaleClock(specification.staleness if specification.mode == "ssp" else None, specification.workers)
        self.roll = RollCall(specification.workers)
        self._free = specification.mode == "async"
        self.updates = 0
        self._shard = shard
        self._begun: dict[int, tuple[int, Begin]] = {}
        self._first: dict[MemberKey, int] = {}  # By id and incarnation of a worker: the step with which it began.
        # By id of a worker that must wait for the slowest worker: the keys of the slices in its pull, and the pull.
        self._held: dict[int, tuple[list[int], Pull]] = {}

    @property
    def finished(self) -> int:
        """Mean number of updates per slice, over the slices whose primary is this server, rounded down."""
        return self.updates // max(1, len(self._shard.own_keys))

    @property
    def entries(self) -> int:
        """Number of workers for which this server keeps a BEGIN message or a waiting pull."""
        return len(self._begun.keys() | self._held.keys())

    def follow(self, view: View) -> None:
        """Act on a new view: remove the workers that are gone, and reply to pulls that waited for these workers."""
        incarnations = view.incarnations
        for worker in self.roll.follow(incarnations):
            self.leave(worker)
            self._begun.pop(worker, None)
        self._first = {member: step for member, step in self._first.items() if incarnations.get(member[0]) == member[1]}
        self.proceed()

    def join(self, worker: int, step: int | None) -> int | None:
        """Add a worker to the clock. The caller must call :meth:`note_position` next.

        Args:
            worker: Id of the worker.
            step: Number of steps that the worker has finished; None for a newcomer, which gets the slowest worker's
                number.

        Returns the number of steps that the worker now counts as having finished. If the worker is a newcomer, and this
        server does not know the steps of all other workers yet, the worker is not added and the result is None.
        """
        if step is None and not (self._free or self.roll.complete):
            return None
        if step and self.clock.expects and self.roll.complete:
            # The joining worker has finished steps, so the run has begun, but this server has not heard of all expected
            # workers. It may replace another server, so it waits until the other workers have reported their steps.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known - {worker})
        return self.clock.join(worker, step)

    def note_first_step(self, member: MemberKey, first: int) -> None:
        """Record the step with which a worker began.

        The worker's pushes must arrive in the order of the steps, beginning with this step.

        Args:
            member: Id and incarnation of the worker.
            first: The step with which the worker began.
        """
        self._first[member] = first

    def note_position(self, worker: int) -> None:
        """Record a worker's reply to the roll call, and reply to the pulls that may now be answered.

        The worker has reported its step, or has reported that it does not take part in steps.
        """
        self.roll.note_position(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Remove a worker from the clock, drop its waiting pull, and reply to pulls that waited for this worker."""
        self.clock.leave(worker)
        self._held.pop(worker, None)
        self.proceed()

    def begin(self, member: MemberKey, step: int, begin: Begin) -> None:
        """Record a worker's BEGIN message, which arrives before the worker's pushes of the step."""
        self._begun[member[0]] = step, begin

    def push(self, member: tuple[int, int], header: Header, payload: memoryview) -> bool:
        """Apply a worker's gradient to its slice.

        Args:
            member: Id and incarnation of the worker.
            header: Header of the PUSH message.
            payload: The encoded gradient.

        Returns False, and does not apply the gradient, if the push has arrived before.

        Raises:
            InvalidMessageError: The push does not fit its slice; or the worker's BEGIN message of the step has not
                arrived; or an earlier push of the worker may be missing.
        """
        key, store = header.key, self._shard.store
        slice_ = store.slices[key]
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        check_absent(header.base, slice_)
        step, begin = self._begun.get(member[0], (-1, None))
        if begin is None or step != header.step or store.versions[key] < 0:
            raise OutdatedMessageError("the push is for a step that has not begun on this server")
        last = store.seen[key].get(member)
        if last is not None and last >= step:
            return False
        # After this push, a push of an earlier step would count as repeated, and its gradient would be lost. So the
        # worker's push of the previous step must have been applied, unless this is the worker's first step.
        if step != self._first.get(member) and (last is None or step > last + 1):
            raise OutdatedMessageError("the worker's pushes of earlier steps have not arrived")
        gradient = None
        if header.encoding != Encoding.NOTHING:
            gradient = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        self._shard.update({key: (gradient, header.base)}, begin.options, member, step)
        self.updates += 1
        return True

    def pull(self, member: tuple[int, int], keys: list[int], request: int, encoding: int) -> None:
        """Keep a worker's pull until the worker may begin its next step, and then reply.

        The values in the reply include the updates with the worker's own pushes.

        Args:
            member: Id and incarnation of the worker.
            keys: Keys of the slices that the worker pulls.
            request: The step in the PULL message, which is also the number of steps that the worker has finished.
            encoding: Encoding of the values in the reply.
        """
        slowest = self.clock.slowest
        self.clock.finished(member[0], request)
        self._held[member[0]] = keys, Pull(request, member=member, step=request - 1, encoding=encoding)
        # This pull can release other workers only if it raises the slowest worker's number of steps. Otherwise only the
        # worker that sent this pull is checked.
        self.proceed(self._held if self.clock.slowest != slowest else (member[0],))

    def will_answer(self, key: int, member: tuple[int, int], request: int) -> bool:
        """Return whether this server can reply to a worker's pull without another message from the worker.

        If this is true, the worker need not repeat its push and its pull of the slice after a lost connection.

        Args:
            key: Key of a slice whose primary is this server.
            member: Id and incarnation of the worker.
            request: The step in the worker's PULL message.
        """
        keys, waiting_pull = self._held.get(member[0], ([], None))
        pull = None
        if waiting_pull is not None and waiting_pull.request == request and key in keys:
            pull = waiting_pull
        pull = pull or self._shard.pull_of(key, member[0], request)
        return pull is not None and (pull.member is None or self._shard.store.seen[key].get(member, -1) >= pull.step)

    def proceed(self, workers: Collection[int] | None = None) -> None:
        """Reply to the waiting pulls of the workers that may now begin their next step.

        Args:
            workers: Ids of the workers to consider, all of which have waiting pulls; None for all waiting workers.
        """
        if not (self._free or self.roll.complete):
            return
        for worker in list(self._held if workers is None else workers):
            keys, pull = self._held[worker]
            if self.clock.may_start(pull.request):
                del self._held[worker]
                self._shard.pull(worker, keys, pull)


class StaleClock:
    """Clock of workers that make steps independently, in mode async or ssp.

    The clock of a worker is the number of steps that the worker has finished. Mode ssp is the "stale synchronous
    parallel" method (Ho et al., NeurIPS 2013).

    Args:
        staleness: Number of steps that a worker may be ahead of the slowest worker; None for no limit.
        expected: Number of workers at the start of the run.
    """

    def __init__(self, staleness: int | None, expected: int = 0) -> None:
        self._staleness = staleness
        self._expected = expected
        self._seen: set[int] = set()
        self._last = 0
        self._clocks: dict[int, int] = {}

    @property
    def known(self) -> frozenset[int]:
        """Ids of all workers that have joined, and have neither left nor died."""
        return frozenset(self._clocks)

    @property
    def expects(self) -> bool:
        """Whether this clock still expects a worker that has not joined yet.

        A worker that has left or died is no longer expected.
        """
        return len(self._seen) < self._expected

    @property
    def slowest(self) -> int:
        """Number of steps that the slowest worker has finished; 0 until all expected workers have joined or died.

        If all workers are gone, this is the largest number of steps that a worker had finished.
        """
        if self.expects:
            return 0
        return min(self._clocks.values(), default=self._last)

    def join(self, worker: int, clock: int | None = None) -> int:
        """Add a worker. If the worker has already joined and its clock is below `clock`, set its clock to `clock`.

        Args:
            worker: Id of the worker.
            clock: Number of steps that the worker has finished; None to give a new worker the slowest worker's clock.

        Returns the worker's clock.
        """
        if clock:
            # The worker has finished steps, so the run has begun. This server may replace another server. It then never
            # receives messages from workers that left before it started, so it stops waiting for expected workers.
            self._expected = 0
        if worker not in self._clocks:
            self._clocks[worker] = self.slowest if clock is None else clock
            self._note(worker)
        elif clock is not None:
            self.finished(worker, clock)
        return self._clocks[worker]

    def finished(self, worker: int, clock: int) -> None:
        """Record that a worker has finished `clock` steps. A lower number than the recorded one has no effect."""
        if worker in self._clocks:
            self._clocks[worker] = max(clock, self._clocks[worker])

    def leave(self, worker: int) -> None:
        """Remove a worker that has left or died. If it has not joined yet, it is no longer expected."""
        self._note(worker)
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            self._last = max(self._last, clock)

    def _note(self, worker: int) -> None:
        if worker < self._expected:  # Joiners have higher ids, and must not count as expected workers.
            self._seen.add(worker)

    def may_start(self, clock: int) -> bool:
        """Return whether a worker that has finished `clock` steps may begin its next step."""
        return self._staleness is None or clock - self.slowest <= self._staleness
