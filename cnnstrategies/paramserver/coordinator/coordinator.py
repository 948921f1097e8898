"""The coordinator: who takes part, and what all of them must agree on. ps-lite calls it the scheduler.

Servers and workers register here and send heartbeats; they receive numbered views of the membership, and workers gather
small values through it. Collectives are numbered, and each is complete when every worker of the group has contributed,
or has left or died: a death ends nobody's wait for ever.

A worker that is started again takes part in the set-up by replaying it: the results of all collectives up to the
start of training are kept, so what it is told is what the others were told. It is let into the group at the next
boundary, a collective at which nobody is in the middle of a step, once every server has seen the view with it.

A coordinator serves one session: when every worker has left, its servers end, and whoever comes later is told. A script
may have several sessions, one after the other, each with a coordinator of its own at the same place; a worker that is
ahead of the others knocks until the one of its session is there.

One that was killed goes on in another process from its journal; see :mod:`.journal`.
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
# The fields of the answer; None if it comes later.
Fields = Mapping[str, object] | None
PAUSE = 0.25  # of the time-out: events of this process come more often while it runs


class Coordinator:
    """Registration, views, collectives and chunks of data for one run: a role; see the module's text.

    Attributes:
        ended: What members are told of the run's end; None before it.
        signal: That a member has received, and after which all are to stop; 0 if none has.
        specification: As the first worker has told it; None before.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._tick = max(0.02, settings.timeout / 20)
        self._looked: float | None = None
        self._asleep = 0.0
        self._effects: Effects = []
        self.answering = Answering()
        self.roster = Roster(settings, self._send, self._forget, self._finish)
        self.dispatcher = Dispatcher()
        self.rounds = Rounds(self.roster, self.dispatcher, self._answer)
        self.ended: Message | None = None
        self.signal = 0
        self.specification: Sequence[Buffer] | None = None
        self._want_specification: dict[Peer, int] = {}  # with the request
        self._circle: list[CollectiveWait] = []
        self._circle_since = 0.0
        self._view, self._view_since = 0, 0.0  # which servers are to see, as results wait for it
        self._stopping: float | None = None
        self._supervisions = {0: settings.supervisor} if settings.supervisor else {}
        # What each role says once it has registered.
        of_both: dict[str, Callable[[float, Member, Message], Fields]] = {
            "leave": self._leave,
            "get": self._get,
            "signal": self._signal,
            "end": self._end_by,
        }
        of_workers: dict[str, Callable[[float, Member, Message], Fields]] = {
            "collect": self._collect,
            "put": self._put,
            "epoch": self._epoch,
            "take": self._take,
            "give_back": self._give_back,
            "progress": self._progress,
        }
        self._handlers = {SERVER: of_both, WORKER: of_both | of_workers}
        self._of_supervision: dict[str, Callable[[float, Peer, Message], Fields]] = {
            "died": self._died,
            "left": self._left,
            "status": self._status,
            "end": self._end,
            "stop": self._stop,
        }

    # The role

    def start(self, now: float) -> Effects:
        """Begin to wait for the members; or go on, in another process than the one that was killed."""
        if self._looked is None:
            self._looked = self.roster.began = now
        else:
            self.roster.history.begun_again(self._awake(now))
        return [Timer(TICK, now + self._tick)]

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Act on a message, if it is of this session."""
        if sender.role == status.WATCHER:
            seen = now - self._asleep
            waits = [*self.rounds.waits, *self.rounds.circle()[1:]]
            answer = status.answer(self._settings, self.roster, seen, message, waits, self.ended)
            return [Send(sender, answer)]
        session = message.integer("session")
        if session == self._settings.session:
            self._handle(self._awake(now), sender, message)
        elif session > self._settings.session and self.ended is not None:
            self._effects.append(End("makes room for the next session", clean=True))
        return self._take_effects()

    def on_timer(self, now: float, name: str) -> Effects:
        """Look for members that are silent, and for what does not end."""
        awake = self._awake(now)
        if self.rounds.view != self._view:
            self._view, self._view_since = self.rounds.view, awake
        self.roster.look(awake, self.ended is not None, self._view, awake - self._view_since)
        self._look_for_circle(awake)
        self._after_change(awake)
        return [*self._take_effects(), Timer(TICK, now + self._tick)]

    def _awake(self, now: float) -> float:
        """The time without that in which this process was stopped: then not the others were silent."""
        assert self._looked is not None, "it has begun"
        passed, self._looked = now - self._looked, now
        if passed > PAUSE * self._settings.timeout:
            self._asleep += passed
        return now - self._asleep

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
            self._hear_supervision(now, sender, message)
        elif message.kind == "over":
            if member is None and self.roster.at(sender.role, sender.id) is not None:
                raise ControlError("it is over for another one")
            self.roster.account_for(sender.role, sender.id)
            if member is not None:
                self.roster.remove(member, left=True)
        elif member is None:
            self._turn_away(sender, message)
        elif message.kind == "beat":
            self._beat(now, member, message)
        else:
            self._request(now, member, message)
        self._after_change(now)

    def _request(self, now: float, member: Member, message: Message) -> None:
        handler = self._handlers[member.peer.role].get(message.kind)
        if handler is None:
            raise ControlError(f"a {member.peer.role} does not say {message.kind!r}")
        if self.ended is not None and message.kind != "leave":
            self._send(member.peer, self.ended)
            return
        if not self.answering.take(member.peer, message):
            return
        try:
            fields = handler(now, member, message)
        except ControlError as error:
            text = f"`{message.kind}` has other contents: {error}"
            self._answer(member.peer, Message(REFUSED, {"message": text}, request=message.request))
        else:
            if fields is not None:
                self._answer(member.peer, Message(DONE, fields, request=message.request))

    def _probe(self, sender: Peer, member: Member | None, message: Message) -> None:
        if member is not None:
            self._effects += self.answering.probe(sender, message)
        else:
            self._send(sender, Message(UNKNOWN, {"ids": message.integers("ids")}))

    def _look_for_circle(self, now: float) -> None:
        """End the run if workers have waited for each other for some seconds."""
        circle = self.rounds.circle()
        if circle != self._circle:
            self._circle, self._circle_since = circle, now
        if circle and now - self._circle_since > self._settings.timeout:
            self._finish(": ".join(["nobody can go on", "; ".join(map(str, circle)), UNEVEN]))

    def _after_change(self, now: float) -> None:
        """Go on with what waited for something that has changed."""
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
            return  # It has left, perhaps before it was told that it is a member.
        if (end := self._end_of(sender)) is not None:
            self._send(sender, Message(REFUSED, end, request=message.request))
        elif self.roster.admit(now, sender, message):
            self._send(sender, Message(DONE, self.roster.view_message.fields, request=message.request))

    def _turn_away(self, sender: Peer, message: Message) -> None:
        """Tell a process that is no member that it is none."""
        if self.roster.gone.get(sender):
            if message.kind == "leave":
                self._send(sender, Message(DONE, request=message.request))
            return
        if (end := self._end_of(sender)) is not None:
            self._send(sender, Message("ended", end))

    def _end_of(self, sender: Peer) -> Fields:
        """Why the run is over for a process that is no member; None if it is not."""
        refusal = self.roster.refusal(sender)
        if refusal is not None:
            return {"message": refusal, "clean": False}
        return None if self.ended is None else self.ended.fields

    def _beat(self, now: float, member: Member, message: Message) -> None:
        figures = status.figures_of(message)
        seen, here, signal = (message.integer(name) for name in ("seen", "here", "signal"))
        member.acknowledged = max(member.acknowledged, seen)
        if figures is not None:
            member.figures, member.measured = figures, now
        pong = {"number": self.roster.number, "losses": self.roster.history.losses}
        self._send(member.peer, Message("pong", pong))
        if self.ended is not None:
            self._send(member.peer, self.ended)
            return
        if here < self.roster.number:
            self._send(member.peer, self.roster.view_message)
        if self.signal and not signal:
            self._send(member.peer, self._stopping_message())

    def _leave(self, now: float, member: Member, message: Message) -> Fields:
        if "epoch" in message.fields:
            self.dispatcher.processed(member.peer.id, message.integer("epoch"), message.integer("processed"))
        self._go(now, member)
        return {}

    def _go(self, now: float, member: Member) -> None:
        self.roster.remove(member, left=True)
        self._forget(member)
        if member.peer.role == WORKER:
            self._leave_group(member.peer.id)
            if not self.roster.of_the_run:
                self._finish("the session is over: every worker has left", clean=True)

    def _forget(self, member: Member) -> None:
        """A process is no longer a member: nothing is kept of it, and nobody waits for it."""
        self.answering.forget(member.peer)
        self._want_specification.pop(member.peer, None)
        if member.peer.role == WORKER:
            self.rounds.forget(member.peer.id)
            if self.roster.sealed:
                self._leave_group(member.peer.id)

    def _leave_group(self, worker: int) -> None:
        # One that was started again may have taken chunks before it was let in.
        self.dispatcher.lose(worker)
        if worker in self.roster.group:
            self.roster.group.discard(worker)
            self.roster.publish()

    # What members ask for

    def _collect(self, now: float, member: Member, message: Message) -> Fields:
        trouble = self.rounds.collect(member, message)
        if trouble is not None:
            self._finish(trouble)
        return None

    def _put(self, now: float, member: Member, message: Message) -> Fields:
        """Keep the first specification that is told, and tell those that wait for it."""
        if self.specification is None:
            self.specification = message.frames
        for peer, request in self._want_specification.items():
            self._answer(peer, Message(DONE, {}, self.specification, request))
        self._want_specification.clear()
        return {}

    def _get(self, now: float, member: Member, message: Message) -> Fields:
        if self.specification is None:
            self._want_specification[member.peer] = message.request
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
        chunk = self.dispatcher.take(member.peer.id, number, processed, self.roster.of_the_run, ordinal)
        return {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop}

    def _give_back(self, now: float, member: Member, message: Message) -> Fields:
        self.dispatcher.give_back(member.peer.id, message.integer("epoch"))
        return {}

    def _progress(self, now: float, member: Member, message: Message) -> Fields:
        number = message.integer("epoch")
        self.dispatcher.processed(member.peer.id, number, message.integer("processed"))
        return {"done": self.dispatcher.progress(number)} if message.flag("tell") else {}

    def _signal(self, now: float, member: Member, message: Message) -> Fields:
        """Tell all to stop after a signal that one has received; the first counts."""
        self.signal = self.signal or message.integer("signal")
        self.roster.tell_all(self._stopping_message())
        return {}

    def _stopping_message(self) -> Message:
        return Message("stopping", {"signal": self.signal})

    # Supervisions

    def _hear_supervision(self, now: float, sender: Peer, message: Message) -> None:
        # The one that has started this process is known; that of another node is who comes first.
        known = self._supervisions.setdefault(sender.id, sender.process) if sender.id < self._settings.nodes else -1
        if known != sender.process:
            raise ControlError(f"{message.kind} of another supervision")
        handler = self._of_supervision.get(message.kind)
        if handler is None:
            raise ControlError(f"a supervision does not say {message.kind!r}")
        self._send(sender, Message(DONE, handler(now, sender, message) or {}, request=message.request))

    def _died(self, now: float, sender: Peer, message: Message) -> Fields:
        role, identity, incarnation = message.string("role"), message.integer("id"), message.integer("incarnation")
        process, how, replaced = message.integer("process"), message.string("how"), message.flag("replaced")
        member = Member(Peer(role, identity, incarnation), process, "this node", now)
        self.roster.died(now, member, how, replaced, over=self.ended is not None)
        return {}

    def _left(self, now: float, sender: Peer, message: Message) -> Fields:
        member = self.roster.at(message.string("role"), message.integer("id"))
        if member is not None and member.peer.incarnation == message.integer("incarnation"):
            self._go(now, member)
        return {}

    def _status(self, now: float, sender: Peer, message: Message) -> Fields:
        return {"silent": self.roster.silent, "ended": None if self.ended is None else dict(self.ended.fields)}

    def _stop(self, now: float, sender: Peer, message: Message) -> Fields:
        """End, once the members of other nodes know why; those of the sender's it has ended itself."""
        ended = {(role, identity) for role, identity in message.table("members", str, int)}
        self._finish("the run is over", clean=True)
        self._stopping = now if self._stopping is None else self._stopping
        for place in ended:
            self.roster.account_for(*place)
        for member in self.roster.members:
            if member.peer[:2] in ended:
                self.roster.remove(member, left=True)
        return {}

    # The end

    def _end(self, now: float, sender: Peer, message: Message) -> Fields:
        self._finish(message.string("message")[:4000], clean=message.flag("clean"))
        return {}

    def _end_by(self, now: float, member: Member, message: Message) -> Fields:
        if self.roster.is_elastic(*member.peer[:2]):
            raise ControlError("who has joined a run does not end it")
        return self._end(now, member.peer, message)

    def _finish(self, text: str, clean: bool = False) -> None:
        """Tell everyone that the run is over, and why."""
        if self.ended is None:
            self.ended = Message("ended", {"message": text, "clean": clean})
            self.roster.tell_all(self.ended)
