"""Steps that all workers make together: sync, local, and ssp without staleness.

A step's members must be the same on every server, also when a worker dies after it has pushed to some of them only.
So one server, the leader, decides: each server tells it whose pushes it has in full, and the leader names the members
once all servers have those of all live workers. With clipping by the global norm the leader then adds up the servers'
squared norms and sends the factor. After a change of the view every server tells the leader again what it has.

Where steps are pipelined the leader names the members sooner: once all live workers have begun the step, so have had
all of the step before. Each slice is then made as soon as its own pushes are there. Of a member that dies only what has
come takes part: it may be in some slices of that step, and not in others.
"""

import math
from dataclasses import replace

from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import LARGEST_NUMBER, Header, InvalidMessageError, Kind
from cnnstrategies.paramserver.server.clocks import RollCall, SyncClock
from cnnstrategies.paramserver.server.decision import Decision, Entry, Reports
from cnnstrategies.paramserver.server.pushes import Backlog, Begin, Updater
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import Who
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification

NO_SLICES = LARGEST_NUMBER - 1  # the step that a server without slices has still to make


class Synchronous:
    """One server's part in common steps."""

    def __init__(self, specification: Specification, shard: Shard, server: int, outbox: Outbox) -> None:
        nodes, per_node = specification.workers, specification.per_node
        self.clock = SyncClock(nodes, per_node)
        self.roll = RollCall(nodes * per_node)  # held as this server begins to lead
        self._specification = specification
        self._pipelined = specification.pipelined
        self._server = server
        self._shard = shard
        self._outbox = outbox
        self._view = View(-1, (), ())
        self._servers: frozenset[int] = frozenset()
        self._homes = {frozenset(slice_.servers) for slice_ in cut(specification)}
        self._lacks_a_home = False  # A slice does: asked for each vote, so not looked for each time.
        self.leader = server  # that decides: the one that has been there longest
        self._backlog = Backlog(shard)
        self._updater = Updater(specification, shard, self._backlog)
        self._lowest: dict[int, int] = {}  # as leader: the steps that servers have still to make
        self._squares: dict[int, float] = {}  # as leader: the norms that servers have told
        self._told_norm = False
        self._reports = Reports(alone=self._pipelined)
        self._decision: Decision | None = None
        self._votes: list[Entry] = []
        self._early: set[int] = set()

    @property
    def finished(self) -> int:
        """Steps that are applied to all own slices."""
        return self._updater.finished

    @property
    def entries(self) -> int:
        """Steps of which pushes are kept."""
        return len(self._backlog.steps)

    # Membership

    def follow(self, view: View) -> None:
        """Go on with another view: without the dead workers, and with what this server now is the primary of."""
        led, self._view = self.leader == self._server and self._view.number >= 0, view
        self._servers = frozenset(server.id for server in view.servers)
        self._lacks_a_home = not all(home & self._servers for home in self._homes)
        self.leader = min(((view.age(server), server.id) for server in view.servers), default=(0, self._server))[1]
        for worker in self.roll.follow(view.incarnations):
            self.clock.leave(worker)
        if self.leader == self._server and not led:
            # One that has come during the run may have met some of the members only.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known)
        self._backlog.compare()
        self._reports.follow(self._servers)
        self._begin_norm()
        self._votes.clear()
        self._lowest = {self._server: self._backlog.lowest(NO_SLICES)}
        if self.leader == self._server:
            self._reports.add(self._server, self._countable())
            if self._decision is not None:
                self._tell_all(self._decision)
        else:
            self._send_status()
        self._plan()
        self.proceed()

    def tell_again(self, server: int) -> None:
        """Repeat what a server has missed some messages about."""
        if self.leader == self._server:
            if self._decision is not None:
                self._outbox.to_server(server, Kind.DECIDE, json=self._decision.as_dict())
        elif self.leader == server:
            self._send_status()
            self._told_norm = False
            self._plan()

    def _send_status(self) -> None:
        decision = None if self._decision is None else self._decision.as_dict()
        complete = [] if self._pipelined else sorted(self._countable())
        report = {"decision": decision, "complete": complete, "lowest": self._backlog.lowest(NO_SLICES)}
        self._outbox.to_server(self.leader, Kind.STATUS, json=report)

    def join(self, worker: int, step: int | None, has: int | None = None) -> int | None:
        """Count a worker from now on, or from the step at which it is; :meth:`here` comes next.

        The step to begin with; None for a newcomer while the leader does not know where the others are. One that `has`
        the gradients of a step which waits for heirs begins with that.
        """
        if step is None and self.leader == self._server:
            if not self._knows_all:
                return None
            if has is not None and self._waits_for_heirs and has == self.clock.step - 1 >= min(self._lowest.values()):
                self.clock.join(worker, has)
                return has
        if step is not None and step > self.clock.step and not self._shard.own:
            # It has been through the steps before, of which this server may not have heard.
            self.clock.decide(step - 1)
            self._forget_before(step - 1)  # It may not hear of decisions, while workers tell it of their steps.
            self._ask_the_early()
        waited = self._waits_for_heirs
        begins = self.clock.join(worker, step)
        if waited and not self._waits_for_heirs:
            self._plan()
        return begins

    @property
    def _waits_for_heirs(self) -> bool:
        """Whether all who make up the decided step have died, where it may be made before all have pushed it.

        Then it waits for who has gradients of it, too, unless somebody is there already who begins after it.
        """
        if not self._pipelined or self._decision is None or self._present:
            return False
        return not self.clock.any_after(self._decision.step)

    @property
    def _present(self) -> list[Who]:
        """The members of the decided step that live: their pushes come again if they are not here."""
        who = () if self._decision is None else self._decision.who
        return [
            (worker, incarnation) for worker, incarnation in who if self.roll.incarnations.get(worker) == incarnation
        ]

    @property
    def _knows_all(self) -> bool:
        """Whether all workers have said where they are, and all servers under this view what they know.

        One that is away, or late, may know that a step is decided that nobody else has heard of.
        """
        return self.roll.complete and not self._lacks_a_home and self._reports.complete(self.clock.step) is not None

    def here(self, worker: int) -> None:
        """A worker has said where it is, or that it is no member."""
        self.roll.here(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Count a worker no longer."""
        self.clock.leave(worker)
        self.proceed()

    def is_missed(self, step: int) -> bool:
        """Whether a step that others have made cannot be made here: all who could push it once more are gone."""
        if self._decision is not None and self._decision.step == step:
            return False  # It is made without them.
        if not self.roll.complete or not self.clock.all_after(step):
            return False
        return all(reached != step for reached, _ in self._backlog.all_complete())  # Else its decision is on its way.

    # Pushes

    def begin(self, who: Who, step: int, begin: Begin) -> None:
        """A worker's pushes of a step follow."""
        known = -1 if self._decision is None else self._decision.step
        # Workers may have told a server without slices of later steps than the last decision that it has heard of.
        lowest = self._backlog.lowest(known if 0 <= known == self.clock.step - 1 else self.clock.step)
        if step > lowest + 1:
            self._early.add(who[0])  # This server is new and does not know yet how far the others are.
        elif step >= lowest:
            self._backlog.of(step).begun.setdefault(who, begin)
            if self._pipelined:
                self._votes.append((step, who[0]))
            else:
                self._vote_if_complete(step, who)

    def push(self, who: Who, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push; whether it is new."""
        if not self._backlog.add(who, header, payload):
            return False
        if not self._pipelined:
            self._vote_if_complete(header.step, who)
        if self._decision is not None and self._decision.step == header.step:
            self._updater.came(header.key, header.step)
        return True

    def holds(self, key: int, who: Who, request: int) -> bool:
        """Whether a worker will get what it has asked for of an own slice without sending anything again."""
        pull = self._shard.pulled_by(key, who[0], request)
        if pull is None:
            return False
        there = self._shard.store.versions[key] >= pull.version
        return there or pull.whole or self._backlog.has(who, pull.version - 1, key)

    # Decisions

    def _vote_if_complete(self, step: int, who: Who) -> None:
        if self._backlog.complete(step, who):
            self._votes.append((step, who[0]))

    def _countable(self) -> set[Entry]:
        """Steps with the members whose pushes of that step are all here."""
        complete = self._backlog.all_begun() if self._pipelined else self._backlog.all_complete()
        return {
            (step, worker)
            for step, (worker, incarnation) in complete
            if self.roll.incarnations.get(worker) == incarnation
        }

    def flush(self) -> None:
        """Tell the leader whose pushes have come in full since the last time: the votes of one look at the messages."""
        votes, self._votes = self._votes, []
        if votes and self.leader == self._server:
            self._reports.add(self._server, votes)
            self.proceed()
        elif votes and not self._pipelined:
            self._outbox.to_server(self.leader, Kind.VOTE, json={"complete": votes})

    def proceed(self) -> None:
        """As leader: decide the present step if all servers have what it needs."""
        if self.leader != self._server or not self.roll.complete:
            return
        if self._lacks_a_home:
            return  # Nobody could make its part of the step.
        step = self.clock.step
        complete = self._reports.complete(step)
        ready = None if complete is None else self.clock.ready(complete)
        if ready is None:
            return
        who = tuple((worker, self.roll.incarnations[worker]) for worker in sorted(ready))
        scale = 1.0 if self._specification.clip_norm is None else None
        decision = Decision(step, who, self._backlog.of(step).begun[who[0]].options, scale)
        self._tell_all(decision)
        self._decide(decision)

    def _tell_all(self, decision: Decision) -> None:
        for server in self._servers - {self._server}:
            self._outbox.to_server(server, Kind.DECIDE, json=decision.as_dict())

    def _decide(self, decision: Decision) -> None:
        known = self._decision
        if known is not None and (decision.step, decision.scale is not None) <= (known.step, known.scale is not None):
            return
        if known is None or decision.step > known.step:
            self._begin_norm()
            self._forget_before(decision.step)
        self._decision, self._shard.store.decided = decision, decision.as_dict()
        self.clock.decide(decision.step)
        self._ask_the_early()
        self._plan()

    def _forget_before(self, step: int) -> None:
        """Drop the pushes of earlier steps and what was said about them: a step is decided with what is here."""
        self._backlog.forget_before(step)
        self._reports.forget_before(step)

    def _ask_the_early(self) -> None:
        """Have the workers whose step was unknown here send it again."""
        for worker in self._early:
            self._outbox.ask_again(worker)
        self._early.clear()

    def from_server(self, server: int, header: Header, said: Message) -> None:
        """Another server's message."""
        if header.kind == Kind.DECIDE and server != self.leader:
            raise InvalidMessageError("a decision of a server that is not the leader")
        is_present = header.incarnation == self._view.number
        if header.kind in (Kind.VOTE, Kind.STATUS):
            complete, decision = self._entries(said), said.part("decision")
            if decision is not None:
                self.adopt(Decision.of(decision, self._specification))
            if is_present:
                self._reports.add(server, complete)
                if header.kind == Kind.STATUS:
                    self._lowest[server] = said.integer("lowest")
            if header.kind == Kind.STATUS and self._decision is not None and self.leader == self._server:
                self._outbox.to_server(server, Kind.DECIDE, json=self._decision.as_dict())
            self.proceed()
        elif header.kind == Kind.DECIDE:
            before = self._decision
            self._decide(Decision.of(said, self._specification))
            if self._decision is before:
                self._told_norm = False  # The leader may have heard it before it knew of the step itself.
                self._send_norm()
        elif header.kind == Kind.NORM and is_present:
            self._add_norm(server, header.step, said.real("square"))

    def _entries(self, said: Message) -> set[Entry]:
        complete = {(step, worker) for step, worker in said.table("complete", int, int)}
        if complete and self._pipelined:
            raise InvalidMessageError("a vote although the leader alone looks who has begun")
        return complete

    def adopt(self, decision: Decision) -> None:
        """Take over what was decided; as a new leader tell the others, too.

        It may come with what was made by it: maybe nobody lives any more who has told of it.
        """
        before = self._decision
        self._decide(decision)
        if self._decision is not before and self.leader == self._server:
            self._tell_all(decision)

    # Application

    def _plan(self) -> None:
        heirs = self.roll.incarnations.items() if self._waits_for_heirs else ()
        self._updater.plan(self._decision, self._present, heirs)
        self._send_norm()

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self._updater.busy

    def work(self) -> None:
        """Form the mean of one slice, or apply it, while :attr:`busy`."""
        assert self._decision is not None
        self._updater.work(self._decision)
        self._send_norm()

    # Clipping by the global norm

    def _begin_norm(self) -> None:
        """Begin anew: with another step, or because the slices have other servers."""
        self._told_norm = False
        self._squares.clear()

    def _send_norm(self) -> None:
        """Tell the leader this server's part once it has all means, if the decided step waits for the factor."""
        decision = self._decision
        if decision is None or decision.scale is not None or self._updater.busy or self._told_norm:
            return
        square = self._updater.squared_norm(decision)
        if square is None:
            return
        self._told_norm = True
        if self.leader == self._server:
            self._add_norm(self._server, decision.step, square)
        else:
            self._outbox.to_server(self.leader, Kind.NORM, step=decision.step, json={"square": square})

    def _add_norm(self, server: int, step: int, square: float) -> None:
        decision = self._decision
        if decision is None or decision.step != step or decision.scale is not None:
            return
        self._squares[server] = square
        if self._squares.keys() >= self._servers:
            assert self._specification.clip_norm is not None
            # As torch.nn.utils.clip_grad_norm_ does it; a norm that is not a number stays one.
            factor = self._specification.clip_norm / (math.sqrt(sum(self._squares.values())) + 1e-6)
            factor = 1.0 if factor > 1 else factor
            scaled = replace(decision, scale=factor)
            self._tell_all(scaled)
            self._decide(scaled)
