"""Steps that all workers make together: sync, local, and ssp without staleness.

A step's members must be the same on every server, also when a worker dies after it has pushed to some of them only.
So one server, the leader, decides: each server tells it whose pushes it has in full, and the leader names the members
once all servers have those of all live workers. With clipping by the global norm the leader then adds up the servers'
squared norms and sends the factor. After a change of the view every server tells the leader again what it has.
"""

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.clocks import SyncClock
from cnnstrategies.paramserver.messages import Header, InvalidMessageError, Kind
from cnnstrategies.paramserver.post import Post
from cnnstrategies.paramserver.pushes import Begin, Pushes
from cnnstrategies.paramserver.shard import Shard
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.store import Options
from cnnstrategies.paramserver.view import View

EVERYBODY = (0xFFFFFFFF, 0)  # whose update the mean of a step is
VIEWS_AHEAD = 16  # reports are kept for so many views that this server has not seen yet


@dataclass(frozen=True)
class Decision:
    """Who makes up a step, with which hyper-parameters, and the factor that clips it once it is known."""

    step: int
    members: tuple[int, ...]
    options: Options
    scale: float | None


class Synchronous:
    """One server's part in common steps.

    Args:
        specification: What all processes of the run agree on.
        shard: Its slices.
        server: Its id.
        post: Sends its messages.

    Attributes:
        clock: Counts the steps and members.
        finished: Steps that are applied to all own slices.
    """

    def __init__(self, specification: Specification, shard: Shard, server: int, post: Post) -> None:
        self.clock = SyncClock(specification.workers)
        self.finished = 0
        self._specification = specification
        self._shard = shard
        self._server = server
        self._post = post
        self._view = View(-1, (), ())
        self._pushes: dict[int, Pushes] = {}
        self._keeps_means = specification.clip_norm is not None or specification.replication > 1
        self._buffers: dict[int | torch.dtype, Tensor] = {}
        self._decision: Decision | None = None
        self._todo: deque[int] = deque()
        self._voted: set[tuple[int, int]] = set()
        self._reports: dict[int, dict[int, set[tuple[int, int]]]] = {}
        self._norms: dict[int, float] = {}
        self._norm_sent = False
        self._lives: dict[int, int] = {}
        self._uneven = False
        self._early: set[int] = set()

    @property
    def leader(self) -> int:
        """The server that decides: the one that has been there longest."""
        return min(((server.since, server.id) for server in self._view.servers), default=(0, self._server))[1]

    # Membership

    def follow(self, view: View) -> None:
        """Go on with another view: without the dead workers, and with what this server now is the primary of."""
        self._view = view
        lives = {worker.id: worker.incarnation for worker in view.workers}
        for worker in [worker for worker, life in self._lives.items() if lives.get(worker) != life]:
            self.clock.leave(worker)
            for step, pushes in self._pushes.items():
                if step >= self.clock.step:
                    pushes.forget(worker)
        self._lives = lives
        # After a server's death some slices may have had the present step and others not.
        self._uneven = len({self._shard.store.versions[key] for key in self._shard.own}) > 1
        self._reports = {number: reports for number, reports in self._reports.items() if number >= view.number}
        self._voted.clear()
        self._norms.clear()
        self._norm_sent = False
        for step, pushes in self._pushes.items():
            for worker in pushes.begun:
                if self._complete(step, worker):
                    self._voted.add((step, worker))
        if self.leader == self._server:
            self._report(self._server, view.number, set(self._voted))
            if self._decision is not None:
                self._tell_all(Kind.DECIDE, asdict(self._decision))
        else:
            self._send_status()
        self._plan()
        self._consider()

    def tell_again(self, server: int) -> None:
        """Repeat what a server has missed some messages about."""
        if self.leader == self._server:
            if self._decision is not None:
                self._post.to_server(server, Kind.DECIDE, json=asdict(self._decision))
        elif self.leader == server:
            self._send_status()
            self._norm_sent = False
            self._plan()

    def _send_status(self) -> None:
        decision = None if self._decision is None else asdict(self._decision)
        report = {"decision": decision, "complete": sorted(self._voted)}
        self._post.to_server(self.leader, Kind.STATUS, base=self._view.number, json=report)

    def join(self, worker: int, step: int | None) -> int:
        """Count a worker from now on, or from the step at which it is."""
        first = self.clock.join(worker, step)
        self._consider()
        return first

    def leave(self, worker: int) -> None:
        """Count a worker no longer."""
        self.clock.leave(worker)
        self._consider()

    def caught_up(self, step: int) -> None:
        """The own slices come from a snapshot, and now count as those of a step."""
        if step > self.clock.step:
            self.clock.decide(step - 1, ())
        self._ask_the_early()
        for old in [old for old in self._pushes if old < step]:
            del self._pushes[old]
        self._plan()
        self._consider()

    # Pushes

    def begin(self, worker: int, step: int, begin: Begin) -> None:
        """A worker's pushes of a step follow."""
        if step > self._lowest + 1:
            self._early.add(worker)  # This server is new and does not know yet how far the others are.
        if step < self._lowest or step > self._lowest + 1:
            return
        self._pushes.setdefault(step, Pushes()).begun.setdefault(worker, begin)
        self._vote(step, worker)

    @property
    def _lowest(self) -> int:
        """The first step that is not applied to all own slices."""
        versions = [self._shard.store.versions[key] for key in self._shard.own]
        return min(versions, default=self.clock.step if self._decision is None else self._decision.step)

    def push(self, who: tuple[int, int], header: Header, payload: memoryview) -> bool:
        """Keep a worker's push; whether it is new.

        Raises:
            InvalidMessageError: No step was begun for it, or the payload does not fit.
        """
        key, step, worker = header.key, header.step, who[0]
        version = self._shard.store.versions[key]
        if version > step:
            return False
        if version < 0 or step > version + 1 or step not in self._pushes or worker not in self._pushes[step].begun:
            raise InvalidMessageError("a push of a step that has not begun")
        pushes = self._pushes[step]
        if not pushes.add(worker, self._shard.store.slices[key], payload, header.encoding):
            return False
        self._vote(step, worker)
        if self._decision is not None and self._decision.step == step and key not in self._todo:
            self._todo.append(key)
        return True

    def _mean(self, pushes: Pushes, key: int, members: tuple[int, ...]) -> Tensor | None:
        """The mean of a slice: of all its workers' pushes at once, while it is in the processor's cache.

        Slices share one buffer, unless the means are needed again: to be clipped, or by libzmq to be sent to backups.
        """
        slice_ = self._shard.store.slices[key]
        place = key if self._keeps_means else slice_.dtype
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < slice_.numel:
            buffer = self._buffers[place] = torch.empty(slice_.numel, dtype=slice_.dtype)
        return pushes.mean(slice_, members, buffer[: slice_.numel])

    # Decisions

    def _complete(self, step: int, worker: int) -> bool:
        pushes = self._pushes[step]
        if pushes.count(worker) == len(self._shard.own):
            return True
        versions = self._shard.store.versions
        return (
            self._uneven
            and worker in pushes.begun
            and all(versions[key] > step or pushes.has(key, (worker,)) for key in self._shard.own)
        )

    def _vote(self, step: int, worker: int) -> None:
        if (step, worker) in self._voted or not self._complete(step, worker):
            return
        self._voted.add((step, worker))
        if self.leader == self._server:
            self._reports.setdefault(self._view.number, {}).setdefault(self._server, set()).add((step, worker))
            self._consider()
        else:
            self._post.to_server(self.leader, Kind.VOTE, base=self._view.number, step=step, json={"worker": worker})

    def _report(self, server: int, view: int, complete: set[tuple[int, int]]) -> None:
        if self._view.number <= view <= self._view.number + VIEWS_AHEAD:
            self._reports.setdefault(view, {}).setdefault(server, set()).update(complete)

    def _consider(self) -> None:
        """As leader: decide the present step if all servers have what it needs."""
        reports = self._reports.get(self._view.number, {})
        servers = {server.id for server in self._view.servers}
        if self.leader != self._server or reports.keys() < servers:
            return
        step = self.clock.step
        complete = {worker for worker in self.clock.members if all((step, worker) in reports[one] for one in servers)}
        members = self.clock.ready(complete)
        if members is None:
            return
        options = self._pushes[step].begun[min(members)].options
        scale = None if self._specification.clip_norm is not None else 1.0
        decision = Decision(step, tuple(sorted(members)), options, scale)
        self._tell_all(Kind.DECIDE, asdict(decision))
        self._decide(decision)

    def _tell_all(self, kind: Kind, values: dict[str, Any]) -> None:
        for server in self._view.servers:
            if server.id != self._server:
                self._post.to_server(server.id, kind, json=values)

    def _decide(self, decision: Decision) -> None:
        known = self._decision
        if known is not None and (decision.step, decision.scale is not None) <= (known.step, known.scale is not None):
            return
        if known is None or decision.step > known.step:
            self._norms.clear()
            self._norm_sent = False
            for step in [step for step in self._pushes if step < decision.step]:
                del self._pushes[step]
            for reports in self._reports.values():
                for complete in reports.values():
                    complete.difference_update([entry for entry in complete if entry[0] < decision.step])
            self._voted = {entry for entry in self._voted if entry[0] >= decision.step}
        self._decision = decision
        self.clock.decide(decision.step, decision.members)
        self._ask_the_early()
        self._plan()

    def _ask_the_early(self) -> None:
        """Have the workers whose step was unknown here send it again."""
        for worker in self._early:
            self._post.ask_again(worker)
        self._early.clear()

    def from_server(self, server: int, header: Header, values: dict[str, Any]) -> None:
        """Another server's message.

        Raises:
            InvalidMessageError: It is not for this server.
        """
        if header.kind in (Kind.DECIDE, Kind.SCALE) and server != self.leader:
            raise InvalidMessageError("a decision of a server that is not the leader")
        if header.kind == Kind.VOTE:
            self._report(server, header.base, {(header.step, int(values["worker"]))})
            self._consider()
        elif header.kind == Kind.STATUS:
            complete = {(int(step), int(worker)) for step, worker in values["complete"]}
            if values["decision"] is not None:
                self._adopt(_decision(values["decision"]))
            self._report(server, header.base, complete)
            if self._decision is not None and self.leader == self._server:
                self._post.to_server(server, Kind.DECIDE, json=asdict(self._decision))
            self._consider()
        elif header.kind == Kind.DECIDE:
            self._decide(_decision(values))
        elif header.kind == Kind.NORM and header.base == self._view.number:
            self._norm(server, header.step, float(values["square"]))
        elif header.kind == Kind.SCALE:
            self._scale(header.step, float(values["factor"]))

    def _adopt(self, decision: Decision) -> None:
        """As new leader: take over what the last one decided, and tell the others."""
        before = self._decision
        self._decide(decision)
        if self._decision is not before and self.leader == self._server:
            self._tell_all(Kind.DECIDE, asdict(decision))

    # Application

    def _plan(self) -> None:
        """List the slices that the decided step is still to be applied to, in the order of their use."""
        decision = self._decision
        versions = self._shard.store.versions
        self._todo = deque(key for key in self._shard.own if decision is not None and versions[key] == decision.step)
        if decision is not None and decision.scale is None and not self._todo and not self._norm_sent:
            self._send_norm(decision)

    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._todo)

    def work(self) -> None:
        """Form the mean of one slice, or apply it."""
        decision = self._decision
        assert decision is not None
        key = self._todo.popleft()
        pushes = self._pushes.setdefault(decision.step, Pushes())
        alive = {worker.id for worker in self._view.workers}
        if self._shard.store.versions[key] != decision.step:
            return
        if not pushes.has(key, [worker for worker in decision.members if worker in alive]):
            return  # A slice taken over from a dead server: its last push brings it back here.
        mean = self._mean(pushes, key, decision.members)
        if decision.scale is None:
            if not self._todo and not self._norm_sent:
                self._send_norm(decision)
            return
        if mean is not None and self._specification.clip_value is not None:
            mean.clamp_(-self._specification.clip_value, self._specification.clip_value)
        if mean is not None and decision.scale != 1.0:
            mean.mul_(decision.scale)
        self._shard.update(key, mean, decision.options, EVERYBODY, decision.step)
        pushes.drop(key)
        if not self._todo:
            self.finished = self._lowest
            self._uneven = False

    def _send_norm(self, decision: Decision) -> None:
        pushes = self._pushes.setdefault(decision.step, Pushes())
        alive = [worker for worker in decision.members if worker in {worker.id for worker in self._view.workers}]
        keys = [key for key in self._shard.own if self._shard.store.versions[key] == decision.step]
        if not all(pushes.has(key, alive) for key in keys):
            return
        means = [self._mean(pushes, key, decision.members) for key in keys]
        norms = [torch.linalg.vector_norm(mean, dtype=torch.float64).item() for mean in means if mean is not None]
        square = sum(norm * norm for norm in norms)
        self._norm_sent = True
        if self.leader == self._server:
            self._norm(self._server, decision.step, square)
        else:
            self._post.to_server(
                self.leader, Kind.NORM, base=self._view.number, step=decision.step, json={"square": square}
            )

    def _norm(self, server: int, step: int, square: float) -> None:
        decision = self._decision
        if decision is None or decision.step != step or decision.scale is not None:
            return
        self._norms[server] = square
        if self._norms.keys() >= {entry.id for entry in self._view.servers}:
            assert self._specification.clip_norm is not None
            # As torch.nn.utils.clip_grad_norm_ does it; a norm that is not a number stays one.
            factor = self._specification.clip_norm / (math.sqrt(sum(self._norms.values())) + 1e-6)
            factor = 1.0 if factor > 1 else factor
            for entry in self._view.servers:
                if entry.id != self._server:
                    self._post.to_server(entry.id, Kind.SCALE, step=step, json={"factor": factor})
            self._scale(step, factor)

    def _scale(self, step: int, factor: float) -> None:
        decision = self._decision
        if decision is not None and decision.step == step and decision.scale is None:
            self._decide(Decision(step, decision.members, decision.options, factor))


def _decision(values: dict[str, Any]) -> Decision:
    scale = values["scale"]
    options = values["options"]
    if not isinstance(options, list) or not all(isinstance(group, dict) for group in options):
        raise InvalidMessageError("hyper-parameters that are no list of objects")
    members = tuple(int(worker) for worker in values["members"])
    return Decision(int(values["step"]), members, options, None if scale is None else float(scale))
