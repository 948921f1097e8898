"""The coordinator: membership, and everything on which all processes must agree. ps-lite calls it the scheduler.

Servers and workers register here and send heartbeats. They receive numbered views of the membership, and workers gather
small values through the coordinator. Collectives are numbered. A collective is complete when every worker of the group
has contributed, or has left or died, so a death does not block the others forever.

A worker that is started again replays the set-up: the coordinator keeps the results of all collectives up to the start
of training, and sends the worker the same results that the others received. The worker is admitted to the group at the
next boundary, once every server has seen the view with that worker. A boundary is a collective at which no worker is in
the middle of a step.

A coordinator serves one session. When every worker has left, the servers end, and later processes are told that the
session is over. A script may have several sessions in sequence, each with its own coordinator at the same place; a
worker that is ahead of the others asks again until the coordinator of its session is there.

A coordinator that was killed continues in another process from its journal; see :mod:`.journal`.
"""

from collections.abc import Callable, Mapping, Sequence

from cnnstrategies.paramserver.coordinator import status
from cnnstrategies.paramserver.coordinator.collective_rounds import UNEVEN, CollectiveWait, Rounds
from cnnstrategies.paramserver.coordinator.dispatch import Dispatcher
from cnnstrategies.paramserver.coordinator.roster import Member, Roster
from cnnstrategies.paramserver.coordinator.settings import SERVER, WORKER, CoordinatorSettings
from cnnstrategies.paramserver.core.node import Buffer, ControlError, Effects, End, Message, Peer, Send, Timer
from cnnstrategies.paramserver.core.requests import DONE, PROBE, REFUSED, UNKNOWN, Answering

TICK = "tick"
# The fields of the answer; None if the answer comes later.
Fields = Mapping[str, object] | None
STOPPED_SHARE = 0.25  # share of the time-out; without an event for longer than this, the process was stopped


class Coordinator:
    """Registration, views, collectives and chunks of data for one run: a role; see the module's text.

    Attributes:
        answering: The requests of all members.
        roster: The members.
        dispatcher: The chunks of samples.
        rounds: The collectives.
        ended: The message about the run's end; None before the end.
        signal: The signal that a member has received, after which all members are to stop; 0 if there is none.
        specification: The run's specification from the first worker; None before it arrives.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._tick = max(0.02, settings.timeout / 20)
        self._last_time: float | None = None
        self._stopped_seconds = 0.0
        self._effects: Effects = []
        self.answering = Answering()
        self.roster = Roster(settings, self._send, self._forget, self._finish)
        self.dispatcher = Dispatcher()
        self.rounds = Rounds(self.roster, self.dispatcher, self._answer)
        self.ended: Message | None = None
        self.signal = 0
        self.specification: Sequence[Buffer] | None = None
        self._awaiting_specification: dict[Peer, int] = {}  # with the number of the request
        self._deadlock: list[CollectiveWait] = []
        self._deadlock_since = 0.0
        # the view that servers must see because results wait for it, and since when
        self._view, self._view_since = 0, 0.0
        self._stopping: float | None = None
        self._supervisions = {0: settings.supervisor} if settings.supervisor else {}
        # The kinds of messages of each role after its registration.
        common_handlers: dict[str, Callable[[float, Member, Message], Fields]] = {
            "leave": self._leave,
            "get": self._get,
            "signal": self._signal,
            "end": self._end_by_member,
        }
        worker_handlers: dict[str, Callable[[float, Member, Message], Fields]] = {
            "collect": self._collect,
            "put": self._put,
            "epoch": self._epoch,
            "take": self._take,
            "give_back": self._give_back,
            "progress": self._progress,
        }
        self._handlers = {SERVER: common_handlers, WORKER: common_handlers | worker_handlers}
        self._supervision_handlers: dict[str, Callable[[float, Peer, Message], Fields]] = {
            "died": self._died,
            "left": self._left,
            "status": self._status,
            "end": self._end,
            "stop": self._stop,
        }

    # The role

    def start(self, now: float) -> Effects:
        """Begin to wait for the members, or continue after another process of this coordinator was killed."""
        if self._last_time is None:
            self._last_time = self.roster.began = now
        else:
            self.roster.history.note_restart(self._awake_time(now))
        return [Timer(TICK, now + self._tick)]

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message, if it belongs to this session."""
        if sender.role == status.WATCHER:
            awake_time = now - self._stopped_seconds
            waits = [*self.rounds.waits, *self.rounds.deadlock()[1:]]
            answer = status.answer(self._settings, self.roster, awake_time, message, waits, self.ended)
            return [Send(sender, answer)]
        session = message.integer("session")
        if session == self._settings.session:
            self._handle(self._awake_time(now), sender, message)
        elif session > self._settings.session and self.ended is not None:
            self._effects.append(End("the next session begins", clean=True))
        return self._take_effects()

    def on_timer(self, now: float, name: str) -> Effects:
        """Check for silent members and for waits that do not end."""
        awake = self._awake_time(now)
        if self.rounds.view != self._view:
            self._view, self._view_since = self.rounds.view, awake
        self.roster.check_members(awake, self.ended is not None, self._view, awake - self._view_since)
        self._check_deadlock(awake)
        self._after_change(awake)
        return [*self._take_effects(), Timer(TICK, now + self._tick)]

    def _awake_time(self, now: float) -> float:
        """Return the time without the pauses in which this process was stopped; members were not silent then."""
        assert self._last_time is not None, "it has begun"
        passed, self._last_time = now - self._last_time, now
        if passed > STOPPED_SHARE * self._settings.timeout:
            self._stopped_seconds += passed
        return now - self._stopped_seconds

    def _take_effects(self) -> Effects:
        effects, self._effects = self._effects, []
        return effects

    def _send(self, peer: Peer, message: Message) -> None:
        self._effects.append(Send(peer, message))

    def _answer(self, peer: Peer, message: Message) -> None:
        self._effects += self.answering.answer(peer, message)

    # Messages

    def _handle(self, now: float, sender: Peer, message: Message) -> None:
        member = self.roster.find(sender)
        if member is not None:
            member.seen = now
        if message.kind == "hello":
            self._hello(now, sender, message)
        elif message.kind == PROBE:
            self._probe(sender, member, message)
        elif sender.role == "supervision":
            self._handle_supervision(now, sender, message)
        elif message.kind == "over":
            if member is None and self.roster.member_at(sender.role, sender.id) is not None:
                raise ControlError("the end of another process's run")
            self.roster.stop_expecting(sender.role, sender.id)
            if member is not None:
                self.roster.remove(member, left=True)
        elif member is None:
            self._refuse(sender, message)
        elif message.kind == "beat":
            self._beat(now, member, message)
        else:
            self._request(now, member, message)
        self._after_change(now)

    def _request(self, now: float, member: Member, message: Message) -> None:
        handler = self._handlers[member.peer.role].get(message.kind)
        if handler is None:
            raise ControlError(f"a {member.peer.role} does not send {message.kind!r}")
        if self.ended is not None and message.kind != "leave":
            self._send(member.peer, self.ended)
            return
        if not self.answering.accept(member.peer, message):
            return
        try:
            fields = handler(now, member, message)
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

    def _check_deadlock(self, now: float) -> None:
        """End the run if workers have waited for each other for the length of the time-out."""
        deadlock = self.rounds.deadlock()
        if deadlock != self._deadlock:
            self._deadlock, self._deadlock_since = deadlock, now
        if deadlock and now - self._deadlock_since > self._settings.timeout:
            self._finish(": ".join(["no worker can go on", "; ".join(map(str, deadlock)), UNEVEN]))

    def _after_change(self, now: float) -> None:
        """Continue with everything that waited for a change."""
        if self._stopping is not None and not self.roster.members:
            late = now - self._stopping > self._settings.timeout
            if late or not self.roster.missing():
                self._effects.append(End("was told to stop", clean=True))
        if self.ended is None:
            self.rounds.go_on()
            if (reason := self.rounds.over) is not None:
                self._finish(reason)

    # Members

    def _hello(self, now: float, sender: Peer, message: Message) -> None:
        if self.roster.gone.get(sender):
            return  # The process has left, perhaps before it heard that it was a member.
        if (end := self._end_for(sender)) is not None:
            self._send(sender, Message(REFUSED, end, request=message.request))
        elif self.roster.admit(now, sender, message):
            self._send(sender, Message(DONE, self.roster.view_message.fields, request=message.request))

    def _refuse(self, sender: Peer, message: Message) -> None:
        """Tell a process that is not a member why the run is over for it."""
        if self.roster.gone.get(sender):
            if message.kind == "leave":
                self._send(sender, Message(DONE, request=message.request))
            return
        if (end := self._end_for(sender)) is not None:
            self._send(sender, Message("ended", end))

    def _end_for(self, sender: Peer) -> Fields:
        """Return why the run is over for a process that is not a member; None if it is not over."""
        refusal = self.roster.refusal(sender)
        if refusal is not None:
            return {"message": refusal, "clean": False}
        return None if self.ended is None else self.ended.fields

    def _beat(self, now: float, member: Member, message: Message) -> None:
        figures = status.figures_of(message)
        seen, view_number, signal = (message.integer(name) for name in ("seen", "here", "signal"))
        member.acknowledged = max(member.acknowledged, seen)
        if figures is not None:
            member.figures, member.measured = figures, now
        pong = {"number": self.roster.number, "losses": self.roster.history.losses}
        self._send(member.peer, Message("pong", pong))
        if self.ended is not None:
            self._send(member.peer, self.ended)
            return
        if view_number < self.roster.number:
            self._send(member.peer, self.roster.view_message)
        if self.signal and not signal:
            self._send(member.peer, self._stopping_message())

    def _leave(self, now: float, member: Member, message: Message) -> Fields:
        if "epoch" in message.fields:
            self.dispatcher.processed(member.peer.id, message.integer("epoch"), message.integer("processed"))
        self._remove_leaver(now, member)
        return {}

    def _remove_leaver(self, now: float, member: Member) -> None:
        self.roster.remove(member, left=True)
        self._forget(member)
        if member.peer.role == WORKER:
            self._leave_group(member.peer.id)
            if not self.roster.original_workers:
                self._finish("the session is over: every worker has left", clean=True)

    def _forget(self, member: Member) -> None:
        """Remove everything about a process that is no longer a member, so that nothing waits for it."""
        self.answering.forget(member.peer)
        self._awaiting_specification.pop(member.peer, None)
        if member.peer.role == WORKER:
            self.rounds.forget(member.peer.id)
            if self.roster.sealed:
                self._leave_group(member.peer.id)

    def _leave_group(self, worker: int) -> None:
        # A worker that was started again may have taken chunks before it was admitted.
        self.dispatcher.lose(worker)
        if worker in self.roster.group:
            self.roster.group.discard(worker)
            self.roster.publish()

    # Members' requests

    def _collect(self, now: float, member: Member, message: Message) -> Fields:
        trouble = self.rounds.collect(member, message)
        if trouble is not None:
            self._finish(trouble)
        return None

    def _put(self, now: float, member: Member, message: Message) -> Fields:
        """Keep the first specification that arrives, and send it to the members that wait for it."""
        if self.specification is None:
            self.specification = message.frames
        for peer, request in self._awaiting_specification.items():
            self._answer(peer, Message(DONE, {}, self.specification, request))
        self._awaiting_specification.clear()
        return {}

    def _get(self, now: float, member: Member, message: Message) -> Fields:
        if self.specification is None:
            self._awaiting_specification[member.peer] = message.request
        else:
            self._answer(member.peer, Message(DONE, {}, self.specification, message.request))
        return None

    def _epoch(self, now: float, member: Member, message: Message) -> Fields:
        number = message.integer("epoch")
        done = message.string("done") if "done" in message.fields else ""
        samples = self.dispatcher.begin(number, message.integer("samples"), message.integer("chunk"), done)
        return {"samples": samples}

    def _take(self, now: float, member: Member, message: Message) -> Fields:
        number, processed, ordinal = (message.integer(name) for name in ("epoch", "processed", "ordinal"))
        chunk = self.dispatcher.take(member.peer.id, number, processed, self.roster.original_workers, ordinal)
        return {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop}

    def _give_back(self, now: float, member: Member, message: Message) -> Fields:
        self.dispatcher.give_back(member.peer.id, message.integer("epoch"))
        return {}

    def _progress(self, now: float, member: Member, message: Message) -> Fields:
        number = message.integer("epoch")
        self.dispatcher.processed(member.peer.id, number, message.integer("processed"))
        return {"done": self.dispatcher.progress(number)} if message.flag("tell") else {}

    def _signal(self, now: float, member: Member, message: Message) -> Fields:
        """Tell all members to stop because one member has received a signal; the first signal counts."""
        self.signal = self.signal or message.integer("signal")
        self.roster.tell_all(self._stopping_message())
        return {}

    def _stopping_message(self) -> Message:
        return Message("stopping", {"signal": self.signal})

    # Messages from supervisions

    def _handle_supervision(self, now: float, sender: Peer, message: Message) -> None:
        # The supervision that started this process is known. On another node, the first process to send a message
        # counts.
        known = self._supervisions.setdefault(sender.id, sender.process) if sender.id < self._settings.nodes else -1
        if known != sender.process:
            raise ControlError(f"{message.kind} from another supervision")
        handler = self._supervision_handlers.get(message.kind)
        if handler is None:
            raise ControlError(f"a supervision does not send {message.kind!r}")
        self._send(sender, Message(DONE, handler(now, sender, message) or {}, request=message.request))

    def _died(self, now: float, sender: Peer, message: Message) -> Fields:
        role, identity, incarnation = message.string("role"), message.integer("id"), message.integer("incarnation")
        process, how, replaced = message.integer("process"), message.string("how"), message.flag("replaced")
        member = Member(Peer(role, identity, incarnation), process, "this node", now)
        self.roster.died(now, member, how, replaced, over=self.ended is not None)
        return {}

    def _left(self, now: float, sender: Peer, message: Message) -> Fields:
        member = self.roster.member_at(message.string("role"), message.integer("id"))
        if member is not None and member.peer.incarnation == message.integer("incarnation"):
            self._remove_leaver(now, member)
        return {}

    def _status(self, now: float, sender: Peer, message: Message) -> Fields:
        return {"silent": self.roster.silent, "ended": None if self.ended is None else dict(self.ended.fields)}

    def _stop(self, now: float, sender: Peer, message: Message) -> Fields:
        """End once the members of other nodes know why; the sender has ended the members of its own node."""
        ended = {(role, identity) for role, identity in message.table("members", str, int)}
        self._finish("the run is over", clean=True)
        self._stopping = now if self._stopping is None else self._stopping
        for role_and_id in ended:
            self.roster.stop_expecting(*role_and_id)
        for member in self.roster.members:
            if member.peer[:2] in ended:
                self.roster.remove(member, left=True)
        return {}

    # The end

    def _end(self, now: float, sender: Peer, message: Message) -> Fields:
        self._finish(message.string("message")[:4000], clean=message.flag("clean"))
        return {}

    def _end_by_member(self, now: float, member: Member, message: Message) -> Fields:
        if self.roster.is_joiners_place(*member.peer[:2]):
            raise ControlError("a joiner cannot end the run")
        return self._end(now, member.peer, message)

    def _finish(self, text: str, clean: bool = False) -> None:
        """Tell all members that the run is over, and why."""
        if self.ended is None:
            self.ended = Message("ended", {"message": text, "clean": clean})
            self.roster.tell_all(self.ended)
