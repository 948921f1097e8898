"""Updates that are applied as they come: async, and ssp with staleness."""

from collections.abc import Collection

from cnnstrategies.paramserver.compression import check_length, decode
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import Encoding, Header, InvalidMessageError
from cnnstrategies.paramserver.server.clocks import RollCall, StaleClock
from cnnstrategies.paramserver.server.pushes import Begin
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import Who, check_absent
from cnnstrategies.paramserver.specification import Specification


class Asynchronous:
    """One server's part in steps that workers make on their own."""

    def __init__(self, specification: Specification, shard: Shard) -> None:
        self.clock = StaleClock(specification.staleness if specification.mode == "ssp" else None, specification.workers)
        self.roll = RollCall(specification.workers)  # held by a server that has come later than the workers
        self._free = specification.mode == "async"
        self.updates = 0
        self._shard = shard
        self._begun: dict[int, tuple[int, Begin]] = {}
        self._first: dict[Who, int] = {}  # the steps that workers have begun with
        self._held: dict[int, tuple[list[int], Pull]] = {}

    @property
    def finished(self) -> int:
        """Updates of all own slices."""
        return self.updates // max(1, len(self._shard.own))

    @property
    def entries(self) -> int:
        """Workers of which something is kept."""
        return len(self._begun.keys() | self._held.keys())

    def follow(self, view: View) -> None:
        """Wait no longer for workers that are gone."""
        incarnations = view.incarnations
        for worker in self.roll.follow(incarnations):
            self.leave(worker)
            self._begun.pop(worker, None)
        self._first = {who: step for who, step in self._first.items() if incarnations.get(who[0]) == who[1]}
        self.proceed()

    def join(self, worker: int, step: int | None) -> int | None:
        """Count a worker from now on; :meth:`here` comes next.

        Its clock; None for a newcomer, which is not counted, while it is not known where the others are.
        """
        if step is None and not (self._free or self.roll.complete):
            return None
        if step and self.clock.expects and self.roll.complete:
            # The run has begun, and this server, which may replace another, has met some of the members only.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known - {worker})
        return self.clock.join(worker, step)

    def met(self, who: Who, first: int) -> None:
        """A worker has said with which step it has begun: all that it has pushed since must be here."""
        self._first[who] = first

    def here(self, worker: int) -> None:
        """A worker has said where it is, or that it is no member."""
        self.roll.here(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Count a worker no longer."""
        self.clock.leave(worker)
        self._held.pop(worker, None)
        self.proceed()

    def begin(self, who: Who, step: int, begin: Begin) -> None:
        """A worker's pushes of a step follow."""
        self._begun[who[0]] = step, begin

    def push(self, who: tuple[int, int], header: Header, payload: memoryview) -> bool:
        """Apply a worker's gradient; whether it is new."""
        key, store = header.key, self._shard.store
        slice_ = store.slices[key]
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        check_absent(header.base, slice_)
        step, begin = self._begun.get(who[0], (-1, None))
        if begin is None or step != header.step or store.versions[key] < 0:
            raise InvalidMessageError("a push of a step that has not begun")
        last = store.seen[key].get(who)
        if last is not None and last >= step:
            return False
        if step != self._first.get(who) and (last is None or step > last + 1):  # Here are values of long before.
            raise InvalidMessageError("a push of a worker that has not said yet what must be here")
        gradient = None
        if header.encoding != Encoding.NOTHING:
            gradient = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        self._shard.update(key, gradient, begin.options, who, step, header.base)
        self.updates += 1
        return True

    def pull(self, who: tuple[int, int], keys: list[int], request: int, encoding: int) -> None:
        """A worker has finished `request` steps and wants slices for the next, with its own pushes in them."""
        slowest = self.clock.slowest
        self.clock.finished(who[0], request)
        self._held[who[0]] = keys, Pull(request, who=who, step=request - 1, encoding=encoding)
        # What holds the others is the slowest: while it has not moved there is nothing to look for among them.
        self.proceed(self._held if self.clock.slowest != slowest else (who[0],))

    def holds(self, key: int, who: tuple[int, int], request: int) -> bool:
        """Whether a worker will get what it has asked for of an own slice without sending anything again."""
        keys, held = self._held.get(who[0], ([], None))
        pull = held if held is not None and held.request == request and key in keys else None
        pull = pull or self._shard.pulled_by(key, who[0], request)
        return pull is not None and (pull.who is None or self._shard.store.seen[key].get(who, -1) >= pull.step)

    def proceed(self, workers: Collection[int] | None = None) -> None:
        """Answer those who may go on, of some workers that are held or all."""
        if not (self._free or self.roll.complete):
            return
        for worker in list(self._held if workers is None else workers):
            keys, pull = self._held[worker]
            if self.clock.may_start(pull.request):
                del self._held[worker]
                self._shard.pull(worker, keys, pull)
