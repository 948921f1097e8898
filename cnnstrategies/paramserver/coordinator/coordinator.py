"""The coordinator: it manages the membership and everything else on which all processes of a run must agree.

In ps-lite the same process is called the scheduler.

Servers and workers register with the coordinator and send heartbeats to it. The coordinator sends them numbered views
of the membership. Workers exchange small values in collectives through the coordinator. A collective does not wait for
dead workers, so the death of a worker does not block the other workers.

The coordinator keeps the results of all collectives before the start of training. A worker that is started again
repeats these collectives, and receives the same results as the other workers. It then waits for the next boundary, a
collective between two steps, and takes part in all later steps. The boundary's result is sent only after all servers
have seen the view with the new worker.

A coordinator serves one session. Once every worker has left, the session is over and the servers end. A process that
registers later receives the message that the session is over. A script may have several sessions in sequence, each with
its own coordinator at the same endpoint. A worker that reaches the next session before the other workers repeats its
registration until the coordinator of that session has started.

If the coordinator's process is killed, another process continues from its journal; see :mod:`.journal`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cnnstrategies.paramserver.coordinator import status
from cnnstrategies.paramserver.coordinator.collective_rounds import UNEVEN, CollectiveWait, Rounds
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.places import Exit, Member
from cnnstrategies.paramserver.coordinator.roster import Roster
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Effects, End, Lasting, Message, Peer, Send, Timer
from cnnstrategies.paramserver.core.requests import DONE, PROBE, REFUSED, UNKNOWN, Answering

TICK = "tick"
SUPERVISION = "supervision"  # role of the processes that start and watch the members
# Result of a method that handles a request: fields of the reply by name; None if the reply is sent later.
Fields = Mapping[str, object] | None
Handler = Callable[[Any, Message], Fields]  # Arguments: the member, or a supervision's process, and the request.


class PublishedSpecification:
    """The run's specification, which a worker has published, and the members that wait for it.

    A later specification may replace it, because parameters were added to the optimizer. All servers then begin again
    with the later one.

    Args:
        roster: The members of the run.
        answer: Function that sends a reply to a member.

    Attributes:
        number: Number of the specification; -1 before a worker has published one.
    """

    def __init__(self, roster: Roster, answer: Callable[[Peer, Message], None]) -> None:
        self._roster = roster
        self._answer = answer
        self.number = -1
        self._frames: Sequence[Buffer] = ()  # the specification, as JSON in one frame
        self._view = 0  # number of the first view with this specification, if it has replaced an earlier one; else 0
        # By member that waits for a specification: number of its request, and lowest number of the specification.
        self._awaiting: dict[Peer, tuple[int, int]] = {}

    def put(self, message: Message) -> None:
        """Store the specification in a worker's message, unless another message has already brought it."""
        number = message.integer("number")
        if number <= self.number:
            return
        if self.number >= 0:
            self._roster.respecify(number)
            self._view = self._roster.number
        self._frames, self.number = message.frames, number

    def ask(self, peer: Peer, message: Message) -> None:
        """Let a member wait for a specification."""
        self._awaiting[peer] = message.request, message.integer("number")

    def forget(self, peer: Peer) -> None:
        """Drop the request of a former member."""
        self._awaiting.pop(peer, None)

    def give(self) -> None:
        """Send the specification to the members that wait for it.

        If the specification has replaced an earlier one, workers get it after all servers have seen the replacement,
        because the servers would drop the workers' messages before.
        """
        unseen = self._view and self._roster.not_seen(self._view)
        for peer, (request, least) in list(self._awaiting.items()):
            if self.number >= least and not (unseen and peer.role == WORKER):
                del self._awaiting[peer]
                self._answer(peer, Message(DONE, {}, self._frames, request))


class Coordinator:
    """The role of the coordinator. It serves registrations, views, collectives and chunks of samples for one session.

    Attributes:
        answering: The requests of members, and the replies to these requests.
        roster: The members of the run.
        dispatcher: The assignment of chunks of samples to workers.
        rounds: The collectives of the workers.
        ended: The message to all members with the reason why the run has ended; None before the end.
        signal: Number of the first signal that a member has received, after which all members must stop; 0 if no member
            has received a signal.
        specification: The run's specification, and the members that wait for it.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._effects: Effects = []
        self.answering = Answering()
        self.roster = Roster(settings, self._send, self._forget, self._finish)
        self.dispatcher = Dispatcher()
        self.rounds = Rounds(self.roster, self.dispatcher, self._answer)
        self.ended: Message | None = None
        self.signal = 0
        self.specification = PublishedSpecification(self.roster, self._answer)
        self._deadlock: Lasting[list[CollectiveWait]] = Lasting([])
        # Number of the view that all servers must see before a collective's result can be sent; 0 if no result waits.
        self._awaited_view = Lasting(0)
        self._stopping: float | None = None  # time at which a supervision process requested the end; None before
        # By number of the node: random number that identifies the node's supervision process.
        self._supervisions = {0: settings.supervisor} if settings.supervisor else {}
        # Both servers and workers may send these kinds of requests, after their registration.
        common: dict[str, Handler] = {
            "leave": self._leave,
            "get": self._get,
            "signal": self._signal,
            "end": self._end_by_member,
        }
        # By role, then by kind of request: the method that handles it.
        self._handlers: dict[str, dict[str, Handler]] = {
            SERVER: common,
            WORKER: {
                **common,
                "collect": self._collect,
                "put": self._put,
                "epoch": self._epoch,
                "take": self._take,
                "give_back": self._give_back,
                "progress": self._progress,
            },
            SUPERVISION: {
                "died": self._died,
                "left": self._left,
                "status": self._status,
                "end": self._end,
                "stop": self._stop,
            },
        }

    def start(self, now: float) -> Effects:
        """Begin to wait for the members, or continue after this coordinator's earlier process was killed."""
        liveness = self.roster.liveness
        is_restarted = liveness.runs
        liveness.pass_to(now)
        if is_restarted:
            self.roster.history.note_restart(liveness.now)
        else:
            self.roster.began = now
        return [self._next_tick(now)]

    def _next_tick(self, now: float) -> Timer:
        return Timer(TICK, now + max(0.02, self._settings.timeout / 20))

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Reply to a watcher, or act on a message of this session.

        A watcher asks for the run's state, and is not a member. Messages of other sessions are dropped. If this session
        is over, a message of a later session ends this role.
        """
        if sender.role == status.WATCHER:
            waits = [*self.rounds.waits, *self.rounds.deadlock()[1:]]
            awake = self.roster.liveness.awake(now)
            answer = status.answer(self._settings, self.roster, awake, message, waits, self.ended)
            return [Send(sender, answer)]
        session = message.integer("session")
        if session == self._settings.session:
            self.roster.liveness.pass_to(now)
            self._handle(sender, message)
        elif session > self._settings.session and self.ended is not None:
            self._effects.append(End("the next session begins", clean=True))
        return self._take_effects()

    def on_timer(self, now: float, name: str) -> Effects:
        """Check for silent members and for deadlocks, and set the timer for the next check."""
        self.roster.liveness.pass_to(now)
        awake, view = self.roster.liveness.now, self.rounds.view
        self.roster.check_members(self.ended is not None, view, self._awaited_view.seconds(awake, view))
        self._check_deadlock()
        self._after_change()
        return [*self._take_effects(), self._next_tick(now)]

    def _take_effects(self) -> Effects:
        effects, self._effects = self._effects, []
        return effects

    def _send(self, peer: Peer, message: Message) -> None:
        self._effects.append(Send(peer, message))

    def _answer(self, peer: Peer, message: Message) -> None:
        self._effects += self.answering.answer(peer, message)

    # Messages

    def _handle(self, sender: Peer, message: Message) -> None:
        member = self.roster.find(sender)
        if member is not None:
            self.roster.liveness.hear(sender)
        if message.kind == "hello":
            self._hello(sender, message)
        elif message.kind == PROBE:
            self._probe(sender, member, message)
        elif sender.role == SUPERVISION:
            self._check_supervision(sender, message)
            fields = self._handler(sender, message)(sender, message)
            self._send(sender, Message(DONE, fields or {}, request=message.request))
        elif message.kind == "over":
            if member is None and self.roster.member_at(sender.role, sender.id) is not None:
                raise ControlError(f"{message.kind}: another process is registered as {sender}")
            self.roster.stop_expecting(sender.role, sender.id)
            if member is not None:
                self.roster.remove(member, Exit.LEFT)
        elif member is None:
            self._refuse(sender, message)
        elif message.kind == "beat":
            self._beat(member, message)
        else:
            self._request(member, message)
        self._after_change()

    def _handler(self, sender: Peer, message: Message) -> Handler:
        handler = self._handlers[sender.role].get(message.kind)
        if handler is None:
            raise ControlError(f"a {sender.role} process must not send the request {message.kind!r}")
        return handler

    def _request(self, member: Member, message: Message) -> None:
        handler = self._handler(member.peer, message)
        if self.ended is not None and message.kind != "leave":
            self._send(member.peer, self.ended)
            return
        if not self.answering.accept(member.peer, message):
            return
        try:
            fields = handler(member, message)
        except ControlError as error:
            text = f"`{message.kind}` has wrong contents: {error}"
            self._answer(member.peer, Message(REFUSED, {"message": text}, request=message.request))
        else:
            if fields is not None:
                self._answer(member.peer, Message(DONE, fields, request=message.request))

    def _probe(self, sender: Peer, member: Member | None, message: Message) -> None:
        if member is not None:
            self._effects += self.answering.probe(sender, message)
        else:
            self._send(sender, Message(UNKNOWN, {"ids": message.integers("ids")}))

    def _check_deadlock(self) -> None:
        """End the run if two groups of workers have waited for each other for longer than the time-out."""
        deadlock = self.rounds.deadlock()
        seconds = self._deadlock.seconds(self.roster.liveness.now, deadlock)
        if deadlock and seconds > self._settings.timeout:
            self._finish(": ".join(["no worker can go on", "; ".join(map(str, deadlock)), UNEVEN]))

    def _after_change(self) -> None:
        """Continue the collectives after an event.

        If a supervision process has requested the end, also end this role when nothing is left to wait for.

        After such a request, the role waits until all members are gone. It also waits for expected processes that have
        never registered, but no longer than the time-out.
        """
        if self._stopping is not None and not self.roster.members:
            late = self.roster.liveness.now - self._stopping > self._settings.timeout
            if late or not self.roster.missing():
                self._effects.append(End("a supervision process requested the end", clean=True))
        if self.ended is None:
            self.specification.give()
            self.rounds.go_on()
            if (reason := self.rounds.over) is not None:
                self._finish(reason)

    # Members

    def _hello(self, sender: Peer, message: Message) -> None:
        if self.roster.gone.get(sender) == Exit.LEFT:
            return  # This is a late copy of a registration whose process has left, so no reply is needed.
        if (stranger := self.roster.stranger(sender, message)) is not None:
            fields = {"message": stranger, "clean": False, "stranger": True}
            self._send(sender, Message(REFUSED, fields, request=message.request))
        elif (end := self._end_for(sender)) is not None:
            self._send(sender, Message(REFUSED, end, request=message.request))
        elif self.roster.admit(sender, message):
            self._send(sender, Message(DONE, self.roster.view_message.fields, request=message.request))

    def _refuse(self, sender: Peer, message: Message) -> None:
        """Act on a message from a process that is not a member.

        If the process has left, repeat the reply to its request to leave, and ignore its other messages. If the run has
        ended or the process may not register, send an `ended` message with the reason.
        """
        if self.roster.gone.get(sender) == Exit.LEFT:
            if message.kind == "leave":
                self._send(sender, Message(DONE, request=message.request))
            return
        if (end := self._end_for(sender)) is not None:
            self._send(sender, Message("ended", end))

    def _end_for(self, sender: Peer) -> Fields:
        """Return the fields of an `ended` message, if a process may not register or the run has ended.

        Return None if the process may register.
        """
        refusal = self.roster.refusal(sender)
        if refusal is not None:
            return {"message": refusal, "clean": False}
        return None if self.ended is None else self.ended.fields

    def _beat(self, member: Member, message: Message) -> None:
        figures = status.figures_of(message)
        seen, view_number, signal = (message.integer(name) for name in ("seen", "here", "signal"))
        member.acknowledged = max(member.acknowledged, seen)
        if figures is not None:
            member.figures, member.measured = figures, self.roster.liveness.now
        pong = {"number": self.roster.number, "losses": self.roster.history.losses}
        self._send(member.peer, Message("pong", pong))
        if self.ended is not None:
            self._send(member.peer, self.ended)
            return
        if view_number < self.roster.number:
            self._send(member.peer, self.roster.view_message)
        if self.signal and not signal:
            self._send(member.peer, self._stopping_message())

    def _leave(self, member: Member, message: Message) -> Fields:
        if "epoch" in message.fields:
            self.dispatcher.processed(member.peer.id, message.integer("epoch"), message.integer("processed"))
        self._remove_leaver(member)
        return {}

    def _remove_leaver(self, member: Member) -> None:
        self.roster.remove(member, Exit.LEFT)
        self._forget(member)
        if member.peer.role == WORKER:
            self._leave_group(member.peer.id)
            if not self.roster.original_workers:
                self._finish("the session is over: every worker has left", clean=True)

    def _forget(self, member: Member) -> None:
        """Drop a former member's requests, and its contributions to collectives."""
        self.answering.forget(member.peer)
        self.specification.forget(member.peer)
        if member.peer.role == WORKER:
            self.rounds.forget(member.peer.id)
            if self.roster.sealed:
                self._leave_group(member.peer.id)

    def _leave_group(self, worker: int) -> None:
        # A worker may take chunks before it is admitted to the group, so the chunks of workers outside the group must
        # also be assigned to other workers.
        self.dispatcher.lose(worker)
        if worker in self.roster.group:
            self.roster.group.discard(worker)
            self.roster.publish()

    # Members' requests

    def _collect(self, member: Member, message: Message) -> Fields:
        trouble = self.rounds.collect(member, message)
        if trouble is not None:
            self._finish(trouble)
        return None

    def _put(self, member: Member, message: Message) -> Fields:
        self.specification.put(message)
        return {}

    def _get(self, member: Member, message: Message) -> Fields:
        self.specification.ask(member.peer, message)
        return None

    def _epoch(self, member: Member, message: Message) -> Fields:
        number = message.integer("epoch")
        done = message.string("done") if "done" in message.fields else ""
        samples = self.dispatcher.begin(number, message.integer("samples"), message.integer("chunk"), done)
        return {"samples": samples}

    def _take(self, member: Member, message: Message) -> Fields:
        number, processed, ordinal = (message.integer(name) for name in ("epoch", "processed", "ordinal"))
        chunk = self.dispatcher.take(member.peer.id, number, processed, self.roster.original_workers, ordinal)
        return {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop}

    def _give_back(self, member: Member, message: Message) -> Fields:
        self.dispatcher.give_back(member.peer.id, message.integer("epoch"))
        return {}

    def _progress(self, member: Member, message: Message) -> Fields:
        number = message.integer("epoch")
        self.dispatcher.processed(member.peer.id, number, message.integer("processed"))
        return {"done": self.dispatcher.progress(number)} if message.flag("tell") else {}

    def _signal(self, member: Member, message: Message) -> Fields:
        """Tell all members to stop, because a member has received a signal.

        If several members have received signals, the number of the first signal is sent.
        """
        self.signal = self.signal or message.integer("signal")
        self.roster.tell_all(self._stopping_message())
        return {}

    def _stopping_message(self) -> Message:
        return Message("stopping", {"signal": self.signal})

    # Messages from supervision processes

    def _check_supervision(self, sender: Peer, message: Message) -> None:
        """Check that a message comes from the supervision process of its node.

        The coordinator knows the random number of the supervision process that started it. For every other node, it
        accepts the first process that sends a message as the node's supervision process, and refuses all others.

        Raises:
            ControlError: The sender is another process.
        """
        known = self._supervisions.setdefault(sender.id, sender.process) if sender.id < self._settings.nodes else -1
        if known != sender.process:
            raise ControlError(f"{message.kind}: the sender is not the supervision process of node {sender.id}")

    def _died(self, sender: Peer, message: Message) -> Fields:
        role, identity, incarnation = message.string("role"), message.integer("id"), message.integer("incarnation")
        process, how, replaced = message.integer("process"), message.string("how"), message.flag("replaced")
        member = Member(Peer(role, identity, incarnation), process, "this node")
        self.roster.died(member, how, replaced, over=self.ended is not None)
        return {}

    def _left(self, sender: Peer, message: Message) -> Fields:
        member = self.roster.member_at(message.string("role"), message.integer("id"))
        if member is not None and member.peer.incarnation == message.integer("incarnation"):
            self._remove_leaver(member)
        return {}

    def _status(self, sender: Peer, message: Message) -> Fields:
        return {"silent": self.roster.silent, "ended": None if self.ended is None else dict(self.ended.fields)}

    def _stop(self, sender: Peer, message: Message) -> Fields:
        """End the run at the request of a supervision process, which has already ended the members of its node.

        :meth:`_after_change` ends this role after the members on other nodes have also ended.
        """
        ended = {(role, identity) for role, identity in message.table("members", str, int)}
        self._finish("the run is over", clean=True)
        self._stopping = self.roster.liveness.now if self._stopping is None else self._stopping
        for role_and_id in ended:
            self.roster.stop_expecting(*role_and_id)
        for member in self.roster.members:
            if member.peer[:2] in ended:
                self.roster.remove(member, Exit.LEFT)
        return {}

    def _end(self, sender: Peer, message: Message) -> Fields:
        self._finish(message.string("message")[:4000], clean=message.flag("clean"))
        return {}

    def _end_by_member(self, member: Member, message: Message) -> Fields:
        if self.roster.is_joiners_place(*member.peer[:2]):
            raise ControlError("a joiner cannot end the run")
        return self._end(member.peer, message)

    def _finish(self, text: str, clean: bool = False) -> None:
        """End the run, and send the reason to all members. If the run has already ended, nothing changes.

        Args:
            text: Reason of the end, for the user.
            clean: Whether the run ends as planned.
        """
        if self.ended is None:
            self.ended = Message("ended", {"message": text, "clean": clean})
            self.roster.tell_all(self.ended)
