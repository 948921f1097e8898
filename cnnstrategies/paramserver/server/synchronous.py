"""Common steps, which all workers make together: the modes sync, local, and ssp with staleness 0.

A step must have the same members on every server, even if a worker dies after it has pushed to only some servers.
Therefore one server, the leader, decides which workers are the members of a step. Each server reports to the leader
which workers' pushes are complete. Once all servers have the pushes of all live workers, the leader sends its decision
to all servers. For clipping by the global norm, each server then sends the squared norm of its slices' mean gradients
to the leader, and the leader sends the decision again with the clipping factor. After each new view, every server
reports its last decision and its complete pushes to the leader, because another server may have become the leader.

In a run with pipelined steps the leader decides earlier: once all live workers have begun the step. A worker begins a
step after it has received all values of the previous step. Each server updates a slice as soon as the members' pushes
of that slice have arrived. If a member dies meanwhile, its gradient is part of the step only in the slices for which
its push has arrived.
"""

import math
from dataclasses import replace

from cnnstrategies.paramserver.core.node import Message
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import LARGEST_NUMBER, Header, InvalidMessageError, Kind, OutdatedMessageError
from cnnstrategies.paramserver.server.decision import (
    CommonStep,
    Decision,
    Entry,
    Leadership,
    Reports,
    RollCall,
    StepEvent,
    StepState,
    SyncClock,
    clipping,
)
from cnnstrategies.paramserver.server.pushes import Backlog, Begin, Updater
from cnnstrategies.paramserver.server.senders import Outbox
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import MemberKey
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification

# A server that is not the primary of any slice reports this number as its first unfinished step. The number is larger
# than every step, so the server does not change the minimum over all servers.
NO_SLICES = LARGEST_NUMBER - 1


class Synchronous:
    """A server's state machine in the modes in which all workers make steps together.

    The server reports complete pushes to the leader, and applies the steps that the leader has decided.

    Attributes:
        clock: The current step and its members.
        roll: The roll call: a new leader waits until every worker has reported its step.
    """

    def __init__(self, specification: Specification, shard: Shard, server: int, outbox: Outbox) -> None:
        nodes, per_node = specification.workers, specification.per_node
        self.clock = SyncClock(nodes, per_node)
        self.roll = RollCall(nodes * per_node)
        self._specification = specification
        self._shard = shard
        self._outbox = outbox
        self._leadership = Leadership(server, [slice_.servers for slice_ in cut(specification)])
        self._backlog = Backlog(shard)
        self._updater = Updater(specification, shard, self._backlog)
        self._reports = Reports(specification.pipelined)
        self._step = CommonStep()
        self._votes: list[Entry] = []
        self._early_workers: set[int] = set()

    @property
    def finished(self) -> int:
        """Number of steps that are applied to all slices whose primary is this server."""
        return self._updater.finished

    @property
    def entries(self) -> int:
        """Number of steps for which this server keeps pushes."""
        return len(self._backlog.steps)

    @property
    def leads(self) -> bool:
        """Whether this server is the leader, which decides the common steps."""
        return self._leadership.leads

    # Membership

    def follow(self, view: View) -> None:
        """Act on a new view: choose the leader, remove dead workers, and report this server's state to the leader.

        A server that becomes the leader begins to collect the other servers' reports. If it does not know the steps of
        all workers, it also begins a roll call.
        """
        becomes_leader = self._leadership.follow(view)
        for worker in self.roll.follow(view.incarnations):
            self.clock.leave(worker)
        if becomes_leader:
            # A server that was started during the run may know the steps of only some workers. So the new leader waits
            # until the other workers have reported their steps.
            self.roll.call(self.roll.incarnations.keys() - self.clock.known)
        self._backlog.compare_versions()
        self._reports.follow(self._leadership.servers)
        self._step.happen(StepEvent.BEGINS_AGAIN)
        self._step.squares.clear()
        self._votes.clear()
        if self.leads:
            self._reports.add(self._leadership.server, self._complete_entries())
            self._reports.lowest[self._leadership.server] = self._backlog.lowest(NO_SLICES)
            if self._step.decision is not None:
                self._send_to_all(self._step.decision)
        else:
            self._send_status()
        self._plan()
        self.proceed()

    def repeat_for(self, server: int) -> None:
        """Send this server's state again to a server that has missed messages of this server.

        If this server is the leader, it sends its decision. If the other server is the leader, this server sends its
        report, and the squared norm of the mean gradient in its slices if this norm is known.
        """
        if self.leads:
            if self._step.decision is not None:
                self._outbox.to_server(server, Kind.DECIDE, json=self._step.decision.as_dict())
        elif self._leadership.leader == server:
            self._send_status()
            self._step.happen(StepEvent.BEGINS_AGAIN)
            self._plan()

    def _send_status(self) -> None:
        decision = None if self._step.decision is None else self._step.decision.as_dict()
        complete = [] if self._specification.pipelined else sorted(self._complete_entries())
        report = {"decision": decision, "complete": complete, "lowest": self._backlog.lowest(NO_SLICES)}
        self._outbox.to_server(self._leadership.leader, Kind.STATUS, json=report)

    def join(self, worker: int, step: int | None, gradients_step: int | None = None) -> int | None:
        """Add a worker to the clock. The caller must call :meth:`note_position` next.

        A newcomer usually begins with the current step. It begins with the previous step if that step waits for
        successors (see :attr:`_waits_for_successors`) and the newcomer has gradients of that step.

        Args:
            worker: Id of the worker.
            step: The step that the worker is working on; None for a newcomer, to which this method assigns a step.
            gradients_step: The step whose gradients a newcomer holds; None if the newcomer holds no gradients.

        Returns the step with which the worker begins. If the worker is a newcomer, and this server is the leader but
        does not know all workers' steps and all servers' states yet, the worker is not added and the result is None.
        """
        if step is None and self.leads:
            if not self._knows_all:
                return None
            is_last_step = gradients_step == self.clock.step - 1
            if is_last_step and self._waits_for_successors and self.clock.step > min(self._reports.lowest.values()):
                self.clock.join(worker, gradients_step)
                return gradients_step
        if step is not None and step > self.clock.step and not self._shard.own_keys:
            # A server without slices may have missed the decisions of the steps that the worker has already finished.
            # It does not need these decisions, so its clock goes on to the worker's step.
            self.clock.decide(step - 1)
            self._forget_before(step - 1)
            self._ask_early_workers()
        waited = self._waits_for_successors
        first_step = self.clock.join(worker, step)
        if waited and not self._waits_for_successors:
            self._plan()
        return first_step

    @property
    def _waits_for_successors(self) -> bool:
        """Whether the decided step may use gradients of workers that are not its members.

        This happens only with pipelined steps, which are decided before all pushes have arrived. If all members of the
        step have died, some of their pushes may be missing forever. Other workers that hold gradients of the step, the
        successors, may then push them. The property becomes false once a worker that begins after the step has joined.
        """
        if not self._specification.pipelined or self._step.decision is None or self._live_members:
            return False
        return not self.clock.any_after(self._step.decision.step)

    @property
    def _live_members(self) -> list[MemberKey]:
        """Ids and incarnations of the decided step's members that are still alive.

        The pushes of a live member will arrive here, because the member repeats lost pushes.
        """
        members = () if self._step.decision is None else self._step.decision.members
        incarnations = self.roll.incarnations
        return [(worker, incarnation) for worker, incarnation in members if incarnations.get(worker) == incarnation]

    @property
    def _knows_all(self) -> bool:
        """Whether this server, as leader, knows the steps of all workers and the state of all servers.

        If this is false, newcomers have to wait: a server that has not reported yet may have the only copy of a
        decision, so the current step may be later than the last step that this server knows.
        """
        return (
            self.roll.complete
            and not self._leadership.lacks_a_holder
            and self._reports.complete(self.clock.step) is not None
        )

    def note_position(self, worker: int) -> None:
        """Record a worker's reply to the roll call, and decide the current step if this is possible now.

        The worker has reported its step, or has reported that it does not take part in steps.
        """
        self.roll.note_position(worker)
        self.proceed()

    def leave(self, worker: int) -> None:
        """Remove a worker from the clock. The other workers make the following steps without this worker."""
        self.clock.leave(worker)
        self.proceed()

    def cannot_make(self, step: int) -> bool:
        """Return whether this server can never make a step that other servers have made.

        This is the case if all workers that could push their gradients of the step again are gone.
        """
        if self._step.decision is not None and self._step.decision.step == step:
            return False  # This server has the decision, so it can make the step without the workers that are gone.
        if not self.roll.complete or not self.clock.all_after(step):
            return False
        # If all pushes of a worker are here, the leader has decided the step, and the decision is on its way. So this
        # server can make the step.
        return all(reached != step for reached, _ in self._backlog.all_complete())

    # Pushes

    def begin(self, member: MemberKey, step: int, begin: Begin) -> None:
        """Act on a worker's BEGIN message, which precedes the worker's pushes of a step.

        Args:
            member: Id and incarnation of the worker.
            step: The step that the worker begins.
            begin: Hyperparameters of the step, and the weight of the worker's gradient.
        """
        known = -1 if self._step.decision is None else self._step.decision.step
        # A server that is not the primary of any slice has no unfinished step. Normally its clock is one step after its
        # last decision, and the decided step counts as unfinished. If the clock is further ahead, decisions have not
        # arrived here, and the clock's step counts as unfinished.
        lowest = self._backlog.lowest(known if 0 <= known == self.clock.step - 1 else self.clock.step)
        if step > lowest + 1:
            # This server is new, and does not know the current step yet. The worker must send the message again later.
            self._early_workers.add(member[0])
        elif step >= lowest:
            self._backlog.pushes_of(step).begun.setdefault(member, begin)
            if self._specification.pipelined:
                self._votes.append((step, member[0]))
            else:
                self._vote_if_complete(step, member)

    def push(self, member: MemberKey, header: Header, payload: memoryview) -> bool:
        """Keep a worker's push until its step is applied.

        Args:
            member: Id and incarnation of the worker.
            header: Header of the PUSH message.
            payload: The encoded gradient.

        Returns False for a push that has arrived before, or whose step is applied already.
        """
        if not self._backlog.add(member, header, payload):
            return False
        if not self._specification.pipelined:
            self._vote_if_complete(header.step, member)
        if self._step.decision is not None and self._step.decision.step == header.step:
            self._updater.note_push(header.key, header.step)
        return True

    def will_answer(self, key: int, member: MemberKey, request: int) -> bool:
        """Return whether this server can reply to a worker's pull without another message from the worker.

        If this is true, the worker need not repeat its push and its pull of the slice after a lost connection.

        Args:
            key: Key of a slice whose primary is this server.
            member: Id and incarnation of the worker.
            request: The step in the worker's PULL message.
        """
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
        """Return pairs of a step and the id of a live worker whose pushes of this step have all arrived here.

        In a run with pipelined steps, there is a pair for each step that a live worker has begun.
        """
        complete = self._backlog.all_begun() if self._specification.pipelined else self._backlog.all_complete()
        return {
            (step, worker)
            for step, (worker, incarnation) in complete
            if self.roll.incarnations.get(worker) == incarnation
        }

    def flush(self) -> None:
        """Report to the leader the workers whose pushes have become complete since the last call of this method."""
        votes, self._votes = self._votes, []
        if votes and self.leads:
            self._reports.add(self._leadership.server, votes)
            self.proceed()
        elif votes and not self._specification.pipelined:
            self._outbox.to_server(self._leadership.leader, Kind.VOTE, json={"complete": votes})

    def proceed(self) -> None:
        """If this server is the leader and the pushes of all members are complete, decide the current step."""
        if not self.leads or not self.roll.complete:
            return
        if self._leadership.lacks_a_holder:
            return  # No step is decided as long as there is a slice that no live server can update.
        step = self.clock.step
        complete = self._reports.complete(step)
        ready = None if complete is None else self.clock.ready(complete)
        if ready is None:
            return
        members = tuple((worker, self.roll.incarnations[worker]) for worker in sorted(ready))
        pushes = self._backlog.pushes_of(step)
        if self._specification.clips_each_step:
            pushes.check_optimizers([member for member in members if member in pushes.begun], self._specification)
        options = pushes.begun[members[0]].options
        scale = 1.0 if clipping(self._specification, options)[0] is None else None
        decision = Decision(step, members, options, scale)
        self._send_to_all(decision)
        self._accept(decision)

    def _send_to_all(self, decision: Decision) -> None:
        """Send a decision to all other servers."""
        for server in self._leadership.servers - {self._leadership.server}:
            self._outbox.to_server(server, Kind.DECIDE, json=decision.as_dict())

    def _accept(self, decision: Decision) -> None:
        """Act on a decision, if it is newer than the known decision; see :meth:`.CommonStep.accept`."""
        last = -1 if self._step.decision is None else self._step.decision.step
        if not self._step.accept(decision):
            return
        if decision.step > last:
            self._forget_before(decision.step)
        self._shard.store.decided = decision.as_dict()
        self.clock.decide(decision.step)
        self._ask_early_workers()
        self._plan()

    def _forget_before(self, step: int) -> None:
        """Drop the pushes and the reports of all steps with a number below `step`."""
        self._backlog.forget_before(step)
        self._reports.forget_before(step)

    def _ask_early_workers(self) -> None:
        """Ask the workers whose messages arrived before this server knew the current step to repeat these messages."""
        for worker in self._early_workers:
            self._outbox.ask_again(worker)
        self._early_workers.clear()

    def on_server_message(self, server: int, header: Header, message: Message) -> None:
        """Act on a STATUS, VOTE, DECIDE or NORM message from another server.

        Raises:
            InvalidMessageError: The other server may not send this message.
            ControlError: A field is missing or has the wrong type.
        """
        if header.kind == Kind.DECIDE and server != self._leadership.leader:
            raise OutdatedMessageError("the message contains a decision, but its sender is not the leader")
        is_current = header.incarnation == self._leadership.view  # The sender acts on the same view as this server.
        if header.kind in (Kind.VOTE, Kind.STATUS):
            complete, decision = self._reported_entries(message), message.part("decision")
            if decision is not None:
                self.adopt(Decision.from_message(decision, self._specification))
            if is_current:
                self._reports.add(server, complete)
                if header.kind == Kind.STATUS:
                    # A server that has not received all initial values yet reports -1.
                    self._reports.lowest[server] = message.integer("lowest", least=-1)
            if header.kind == Kind.STATUS and self._step.decision is not None and self.leads:
                self._outbox.to_server(server, Kind.DECIDE, json=self._step.decision.as_dict())
            self.proceed()
        elif header.kind == Kind.DECIDE:
            previous_decision = self._step.decision
            self._accept(Decision.from_message(message, self._specification))
            if self._step.decision is previous_decision:
                # The leader has sent its decision again. A leader ignores norms that arrive before it has the decision.
                # The leader may have ignored this server's norm in this way, so send the norm again.
                self._step.happen(StepEvent.BEGINS_AGAIN)
                self._send_norm()
        elif header.kind == Kind.NORM and is_current:
            self._add_norm(server, header.step, message.real("square"))

    def _reported_entries(self, message: Message) -> set[Entry]:
        complete = {(step, worker) for step, worker in message.table("complete", int, int)}
        if complete and self._specification.pipelined:
            raise InvalidMessageError("the message contains votes, but servers with pipelined steps do not vote")
        return complete

    def adopt(self, decision: Decision) -> None:
        """Accept a decision from a RELAY, COPY or STATUS message.

        If this server is the leader, it also sends the decision to all servers. The earlier leader, which made the
        decision, may have died before all servers received the decision.
        """
        previous_decision = self._step.decision
        self._accept(decision)
        if self._step.decision is not previous_decision and self.leads:
            self._send_to_all(decision)

    def _plan(self) -> None:
        """Tell the updater which slices to update, because the decision or the membership has changed."""
        successors = self.roll.incarnations.items() if self._waits_for_successors else ()
        self._updater.plan(self._step.decision, self._live_members, successors)
        self._send_norm()

    @property
    def busy(self) -> bool:
        """Whether at least one slice of the decided step is ready for :meth:`work`.

        A slice is ready once all pushes that the step needs for the slice have arrived.
        """
        return self._updater.busy

    def work(self) -> None:
        """Compute the mean gradient of one slice, and update the slice if the step's clipping factor is known.

        Call this only while :attr:`busy` is true.
        """
        assert self._step.decision is not None
        self._updater.work(self._step.decision)
        self._send_norm()

    # Clipping by the global norm

    def _send_norm(self) -> None:
        """Send this server's squared norm to the leader, unless it was sent or the step's clipping factor is known.

        The norm is sent once the mean gradients of all slices whose primary is this server are known.
        """
        decision = self._step.decision
        if decision is None or self._step.state != StepState.MEASURED or self._updater.busy:
            return
        square = self._updater.squared_norm(decision)
        if square is None:
            return
        self._step.happen(StepEvent.SENDS_NORM)
        if self.leads:
            self._add_norm(self._leadership.server, decision.step, square)
        else:
            self._outbox.to_server(self._leadership.leader, Kind.NORM, step=decision.step, json={"square": square})

    def _add_norm(self, server: int, step: int, square: float) -> None:
        """Record the squared norm of a server's mean gradient. Only the leader calls this method.

        Once the norms of all servers are known, the leader computes the clipping factor and sends it to all servers.
        """
        decision = self._step.decision
        if decision is None or decision.step != step or decision.scale is not None:
            return
        self._step.squares[server] = square
        if self._step.squares.keys() >= self._leadership.servers:
            clip_norm, _ = clipping(self._specification, decision.options)
            assert clip_norm is not None
            # The same formula as in torch.nn.utils.clip_grad_norm_. A NaN norm makes the factor NaN.
            factor = clip_norm / (math.sqrt(sum(self._step.squares.values())) + 1e-6)
            factor = 1.0 if factor > 1 else factor
            scaled = replace(decision, scale=factor)
            self._send_to_all(scaled)
            self._accept(scaled)
