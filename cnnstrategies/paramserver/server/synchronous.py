"""Steps that all workers make together: the modes sync, local, and ssp without staleness.

A step must have the same members on every server, even if a worker dies after it has pushed to only some servers.
Therefore one server, the leader, decides. Each server reports to the leader which workers' pushes are complete, and the
leader names the members once all servers have the pushes of all live workers. For clipping by the global norm the
leader then adds up the servers' squared norms and sends the factor. After a change of the view every server reports its
state to the leader again.

Where steps are pipelined the leader names the members earlier: once all live workers have begun the step, and therefore
have the values of the whole step before. Each slice is then updated as soon as its own pushes have arrived. If a member
dies, the pushes that have arrived take part: the step may contain them in some slices and not in others.
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
from cnnstrategies.paramserver.server.store import MemberKey
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification

NO_SLICES = LARGEST_NUMBER - 1  # the next step of a server without slices


class Synchronous:
    """One server's part in common steps.

    Attributes:
        clock: The present step and its members.
        roll: The workers whose step this server, as a new leader, does not know yet.
        leader: Id of the server that decides: the oldest one.
    """

    def __init__(self, specification: Specification, shard: Shard, server: int, outbox: Outbox) -> None:
        nodes, per_node = specification.workers, specification.per_node
        self.clock = SyncClock(nodes, per_node)
        self.roll = RollCall(nodes * per_node)  # A server that begins to lead waits for the workers' reports.
        self._specification = specification
        self._pipelined = specification.pipelined
        self._server = server
        self._shard = shard
        self._outbox = outbox
        self._view = View(-1, (), ())
        self._servers: frozenset[int] = frozenset()
        self._holder_sets = {frozenset(slice_.servers) for slice_ in cut(specification)}
        self._lacks_a_holder = False  # whether a slice is on no live server; kept because each vote asks for it
        self.leader = server
        self._backlog = Backlog(shard)
        self._updater = Updater(specification, shard, self._backlog)
        self._lowest_steps: dict[int, int] = {}  # as leader: the first step that each server has not finished
        self._squares: dict[int, float] = {}  # as leader: squared norms by server
        self._norm_sent = False
        self._reports = Reports(alone=self._pipelined)
        self._decision: Decision | None = None
        self._votes: list[Entry] = []
        self._early_workers: set[int] = set()

    @property
    def finished(self) -> int:
        """The number of steps that are applied to all own slices."""
        return self._updater.finished

    @property
    def entries(self) -> int:
        """The number of steps with pushes that this server keeps."""
        return len(self._backlog.steps)

    # Membership

    def follow(self, view: View) -> None:
        """Follow another view: without dead workers, and with the slices whose primary is now this server."""
        was_leader, self._view = self.leader == self._server and self._view.number >= 0, view
        self._servers = frozenset(server.id for server in view.servers)
        self._lacks_a_holder = not all(holders & self._servers for holders in self._holder_sets)
        self.leader = min(((view.age(server), server.id) for server in view.servers), default=(0, self._server))[1]
        for worker in self.roll.follow(view.incarnations):
            self.clock.leave(worker)
        if self.leader == self._server and not was_leader:
            # A server that started during the run may know only some of the members.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known)
        self._backlog.compare_versions()
        self._reports.follow(self._servers)
        self._begin_norm()
        self._votes.clear()
        self._lowest_steps = {self._server: self._backlog.lowest(NO_SLICES)}
        if self.leader == self._server:
            self._reports.add(self._server, self._complete_entries())
            if self._decision is not None:
                self._send_to_all(self._decision)
        else:
            self._send_status()
        self._plan()
        self.proceed()

    def repeat_for(self, server: int) -> None:
        """Send a server the present state after it has missed messages."""
        if self.leader == self._server:
            if self._decision is not None:
                self._outbox.to_server(server, Kind.DECIDE, json=self._decision.as_dict())
        elif self.leader == server:
            self._send_status()
            self._norm_sent = False
            self._plan()

    def _send_status(self) -> None:
        decision = None if self._decision is None else self._decision.as_dict()
        complete = [] if self._pipelined else sorted(self._complete_entries())
        report = {"decision": decision, "complete": complete, "lowest": self._backlog.lowest(NO_SLICES)}
        self._outbox.to_server(self.leader, Kind.STATUS, json=report)

    def join(self, worker: int, step: int | None, gradients_step: int | None = None) -> int | None:
        """Count a worker from the step at which it is, or as a newcomer; :meth:`note_position` must be called next.

        A newcomer that has gradients of a step that waits for successors begins with that step.

        Args:
            worker: Id of the worker.
            step: The worker's step; None for a newcomer.
            gradients_step: The step of which a newcomer has gradients, if it has any.

        Returns the step with which the worker begins. Returns None for a newcomer while the leader does not know the
        steps of all other workers.
        """
        if step is None and self.leader == self._server:
            if not self._knows_all:
                return None
            is_last_step = gradients_step == self.clock.step - 1
            if is_last_step and self._waits_for_successors and self.clock.step > min(self._lowest_steps.values()):
                self.clock.join(worker, gradients_step)
                return gradients_step
        if step is not None and step > self.clock.step and not self._shard.own_keys:
            # The worker has finished earlier steps of which this server may not have heard.
            self.clock.decide(step - 1)
            self._forget_before(step - 1)  # Workers report their steps, but decisions may not arrive.
            self._ask_early_workers()
        waited = self._waits_for_successors
        first_step = self.clock.join(worker, step)
        if waited and not self._waits_for_successors:
            self._plan()
        return first_step

    @property
    def _waits_for_successors(self) -> bool:
        """Whether all members of the decided step have died although the step may lack some of their pushes.

        This happens only where steps are pipelined. The step then also takes gradients of other workers that have them,
        unless a worker has joined that begins after the step.
        """
        if not self._pipelined or self._decision is None or self._live_members:
            return False
        return not self.clock.any_after(self._decision.step)

    @property
    def _live_members(self) -> list[MemberKey]:
        """The members of the decided step that live. They push again if their pushes are not here."""
        members = () if self._decision is None else self._decision.members
        incarnations = self.roll.incarnations
        return [(worker, incarnation) for worker, incarnation in members if incarnations.get(worker) == incarnation]

    @property
    def _knows_all(self) -> bool:
        """Whether all workers have reported their steps, and all servers have reported their state under this view.

        A missing or late server may know a decision that no other server has received.
        """
        return self.roll.complete and not self._lacks_a_holder and self._reports.complete(self.clock.step) is not None

    def note_position(self, worker: int) -> None:
        """Note that a worker has reported its step, or that it is not a member."""
        self.roll.note_position(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Stop counting a worker."""
        self.clock.leave(worker)
        self.proceed()

    def cannot_make(self, step: int) -> bool:
        """Whether this server missed a step that others made: every worker that could push the step again is gone."""
        if self._decision is not None and self._decision.step == step:
            return False  # The step is made without the dead workers.
        if not self.roll.complete or not self.clock.all_after(step):
            return False
        # If the pushes of a worker are complete, the decision is on its way.
        return all(reached != step for reached, _ in self._backlog.all_complete())

    # Pushes

    def begin(self, member: MemberKey, step: int, begin: Begin) -> None:
        """Note the hyper-parameters and weight of a worker's step; the worker's pushes of the step follow."""
        known = -1 if self._decision is None else self._decision.step
        # Workers may have reported later steps than the last decision that this server without slices has received.
        lowest = self._backlog.lowest(known if 0 <= known == self.clock.step - 1 else self.clock.step)
        if step > lowest + 1:
            self._early_workers.add(member[0])  # This server is new and does not know the others' step yet.
        elif step >= lowest:
            self._backlog.pushes_of(step).begun.setdefault(member, begin)
            if self._pipelined:
                self._votes.append((step, member[0]))
            else:
                self._vote_if_complete(step, member)

    def push(self, member: MemberKey, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push. Return whether it is new."""
        if not self._backlog.add(member, header, payload):
            return False
        if not self._pipelined:
            self._vote_if_complete(header.step, member)
        if self._decision is not None and self._decision.step == header.step:
            self._updater.note_push(header.key, header.step)
        return True

    def will_answer(self, key: int, member: MemberKey, request: int) -> bool:
        """Whether this server will answer a worker's pull of an own slice although the worker sends nothing again."""
        pull = self._shard.pull_of(key, member[0], request)
        if pull is None:
            return False
        has_version = self._shard.store.versions[key] >= pull.version
        return has_version or pull.whole or self._backlog.has(member, pull.version - 1, key)

    # Decisions

    def _vote_if_complete(self, step: int, member: MemberKey) -> None:
        if self._backlog.complete(step, member):
            self._votes.append((step, member[0]))

    def _complete_entries(self) -> set[Entry]:
        """Return each step with each live member whose pushes of that step are complete.

        Where steps are pipelined, a member that has begun the step counts as complete.
        """
        complete = self._backlog.all_begun() if self._pipelined else self._backlog.all_complete()
        return {
            (step, worker)
            for step, (worker, incarnation) in complete
            if self.roll.incarnations.get(worker) == incarnation
        }

    def flush(self) -> None:
        """Report to the leader which workers' pushes became complete since the last call."""
        votes, self._votes = self._votes, []
        if votes and self.leader == self._server:
            self._reports.add(self._server, votes)
            self.proceed()
        elif votes and not self._pipelined:
            self._outbox.to_server(self.leader, Kind.VOTE, json={"complete": votes})

    def proceed(self) -> None:
        """Decide the present step, as the leader, if all servers have the pushes that it needs."""
        if self.leader != self._server or not self.roll.complete:
            return
        if self._lacks_a_holder:
            return  # No server could update that slice.
        step = self.clock.step
        complete = self._reports.complete(step)
        ready = None if complete is None else self.clock.ready(complete)
        if ready is None:
            return
        members = tuple((worker, self.roll.incarnations[worker]) for worker in sorted(ready))
        scale = 1.0 if self._specification.clip_norm is None else None
        decision = Decision(step, members, self._backlog.pushes_of(step).begun[members[0]].options, scale)
        self._send_to_all(decision)
        self._accept(decision)

    def _send_to_all(self, decision: Decision) -> None:
        """Send a decision to all other servers."""
        for server in self._servers - {self._server}:
            self._outbox.to_server(server, Kind.DECIDE, json=decision.as_dict())

    def _accept(self, decision: Decision) -> None:
        """Make a decision the present one, unless the present one is the same or newer."""
        known = self._decision
        if known is not None and (decision.step, decision.scale is not None) <= (known.step, known.scale is not None):
            return
        if known is None or decision.step > known.step:
            self._begin_norm()
            self._forget_before(decision.step)
        self._decision, self._shard.store.decided = decision, decision.as_dict()
        self.clock.decide(decision.step)
        self._ask_early_workers()
        self._plan()

    def _forget_before(self, step: int) -> None:
        """Drop the pushes of earlier steps and the reports on them, which this server no longer needs."""
        self._backlog.forget_before(step)
        self._reports.forget_before(step)

    def _ask_early_workers(self) -> None:
        """Ask the workers whose step was unknown here to send it again."""
        for worker in self._early_workers:
            self._outbox.ask_again(worker)
        self._early_workers.clear()

    def on_server_message(self, server: int, header: Header, message: Message) -> None:
        """Act on another server's message."""
        if header.kind == Kind.DECIDE and server != self.leader:
            raise InvalidMessageError("a decision of a server that is not the leader")
        is_present = header.incarnation == self._view.number
        if header.kind in (Kind.VOTE, Kind.STATUS):
            complete, decision = self._reported_entries(message), message.part("decision")
            if decision is not None:
                self.adopt(Decision.from_message(decision, self._specification))
            if is_present:
                self._reports.add(server, complete)
                if header.kind == Kind.STATUS:
                    self._lowest_steps[server] = message.integer("lowest")
            if header.kind == Kind.STATUS and self._decision is not None and self.leader == self._server:
                self._outbox.to_server(server, Kind.DECIDE, json=self._decision.as_dict())
            self.proceed()
        elif header.kind == Kind.DECIDE:
            previous_decision = self._decision
            self._accept(Decision.from_message(message, self._specification))
            if self._decision is previous_decision:
                self._norm_sent = False  # The norm may have arrived before the leader knew of the step.
                self._send_norm()
        elif header.kind == Kind.NORM and is_present:
            self._add_norm(server, header.step, message.real("square"))

    def _reported_entries(self, message: Message) -> set[Entry]:
        complete = {(step, worker) for step, worker in message.table("complete", int, int)}
        if complete and self._pipelined:
            raise InvalidMessageError("a vote although the leader decides from its own messages")
        return complete

    def adopt(self, decision: Decision) -> None:
        """Take over a decision that arrived with a slice's values; a new leader also sends it to the other servers.

        The server that first sent the decision may be dead by now.
        """
        previous_decision = self._decision
        self._accept(decision)
        if self._decision is not previous_decision and self.leader == self._server:
            self._send_to_all(decision)

    # Application

    def _plan(self) -> None:
        successors = self.roll.incarnations.items() if self._waits_for_successors else ()
        self._updater.plan(self._decision, self._live_members, successors)
        self._send_norm()

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self._updater.busy

    def work(self) -> None:
        """Compute or apply the mean of one slice; only while :attr:`busy` is true."""
        assert self._decision is not None
        self._updater.work(self._decision)
        self._send_norm()

    # Clipping by the global norm

    def _begin_norm(self) -> None:
        """Start the global norm again: for another step, or because the slices are on other servers."""
        self._norm_sent = False
        self._squares.clear()

    def _send_norm(self) -> None:
        """Send the leader this server's squared norm if the decided step needs the factor and all means are known."""
        decision = self._decision
        if decision is None or decision.scale is not None or self._updater.busy or self._norm_sent:
            return
        square = self._updater.squared_norm(decision)
        if square is None:
            return
        self._norm_sent = True
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
            # The same formula as in torch.nn.utils.clip_grad_norm_. A NaN norm makes the factor NaN.
            factor = self._specification.clip_norm / (math.sqrt(sum(self._squares.values())) + 1e-6)
            factor = 1.0 if factor > 1 else factor
            scaled = replace(decision, scale=factor)
            self._send_to_all(scaled)
            self._accept(scaled)
