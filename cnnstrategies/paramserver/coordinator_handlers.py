"""What the coordinator does with each kind of message, and when members are silent."""

import secrets
import time
from collections.abc import Callable

from cnnstrategies.paramserver import coordinator_settings
from cnnstrategies.paramserver.control import ControlError, Message
from cnnstrategies.paramserver.coordinator_settings import CoordinatorSettings
from cnnstrategies.paramserver.dispatch import Dispatcher
from cnnstrategies.paramserver.roster import SERVER, SUPERVISION, WORKER, Member, Roster
from cnnstrategies.paramserver.rounds import Rounds
from cnnstrategies.paramserver.values import Values

MOST_NOTICES = 16
CONFIRM_SECONDS = 5.0  # for a supervision to say what becomes of one that was silent
TAKE_UP_SECONDS = 60.0  # at least, for a server that lives to take up a view: one that has just come allocates
# What each role sends, once it has said hello.
_SENT_BY = {
    WORKER: frozenset({"beat", "leave", "collect", "put", "get", "epoch", "take", "notice", "end"}),
    SERVER: frozenset({"beat", "leave", "get"}),
    SUPERVISION: frozenset({"died", "end", "stop", "status"}),
}
_REFUSED = frozenset({"beat", "collect", "epoch", "take"})


def _sender(message: Message) -> tuple[str, int]:
    """Who says to have sent a message."""
    by = message.fields.get("by")
    if not isinstance(by, list) or len(by) != 2 or not isinstance(by[0], str) or type(by[1]) is not int or by[1] < 0:
        raise ControlError(f"{message.kind} of nobody")
    return by[0], by[1]


class CoordinatorHandlers:
    """Acts on the members' messages, and decides whether a run goes on without those that are gone.

    Args:
        settings: Of the coordinator.
        send: Sends a message to the connection that it names.

    Attributes:
        stopped: Whether the coordinator was told to stop, or makes room for that of the next session.
    """

    def __init__(self, settings: CoordinatorSettings, send: Callable[[Message], None]) -> None:
        self.stopped = False
        self._settings = settings
        self._send = send
        self._roster = Roster(settings.workers, settings.servers, settings.survivable, send)
        self._rounds = Rounds(self._roster, send)
        self._values = Values(send)
        self._dispatcher = Dispatcher()
        self._began = time.monotonic()
        self._ended: Message | None = None
        self._supervisions = {0: settings.supervisor} if settings.supervisor else {}
        self._silent: list[list[str | int]] = []
        self._notices: dict[str, int] = {}
        self._promised: dict[tuple[str, int], tuple[float, Member, str]] = {}
        self._handlers: dict[str, Callable[[Message], None]] = {
            "hello": self._hello,
            "beat": self._beat,
            "leave": self._leave,
            "collect": self._collect,
            "put": self._values.put,
            "get": self._values.get,
            "epoch": self._epoch,
            "take": self._take,
            "died": self._died,
            "end": self._end,
            "stop": self._stop,
            "status": self._status,
            "notice": self._notice,
        }

    def handle(self, message: Message) -> None:
        """Act on one message, if it is of this session.

        Raises:
            ControlError: It is of an unknown kind or has other fields.
        """
        session = message.integer("session")
        if session != self._settings.session:
            self.stopped |= session > self._settings.session and self._ended is not None
            return
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise ControlError(f"unknown kind {message.kind!r}")
        if message.kind == "hello" or self._may_send(message):
            handler(message)

    def _may_send(self, message: Message) -> bool:
        """Whether the sender is a member whose role sends such messages; one that was a member is told that it is not.

        Raises:
            ControlError: It never was one, or its role does not.
        """
        role, identity = _sender(message)
        if message.kind not in _SENT_BY.get(role, ()):
            raise ControlError(f"{message.kind} of a {role}")
        if role == SUPERVISION:
            token = self._supervisions.get(identity)
        else:
            member = self._roster.find(role, identity)
            token = None if member is None else member.token
            if "role" in message.fields and (message.string("role"), message.integer("id")) != (role, identity):
                raise ControlError(f"{message.kind} in another one's name")
        if token is not None and secrets.compare_digest(token.encode(), message.string("token").encode()):
            return True
        if message.kind in _REFUSED:
            self._refuse_the_dead(message)
        elif message.kind == "leave":
            self._reply(message, Message("left"))  # It has left already, and asks again, for the answer was lost.
        else:
            raise ControlError(f"{message.kind} of no member")
        return False

    # Who is here

    def _hello(self, message: Message) -> None:
        role, identity = message.string("role"), message.integer("id")
        if _sender(message) != (role, identity) or not message.string("token"):
            raise ControlError("a hello in another one's name")
        if role == SUPERVISION:
            if identity < self._settings.nodes:
                self._supervisions.setdefault(identity, message.string("token"))
            return
        if not self._roster.expects(role, identity):
            self._refuse(
                message.sender,
                f"this run has {self._settings.workers} workers and {self._settings.servers} "
                f"servers: no {role} {identity} is expected",
            )
            return
        member = Member(
            role,
            identity,
            message.integer("incarnation"),
            message.integer("process"),
            message.string("host")[:255],
            message.sender,
            time.monotonic(),
            message.string("endpoint"),
            message.string("public_key"),
            token=message.string("token"),
        )
        known = self._roster.find(role, identity)
        if known is not None and known.token == member.token:
            known.connection = message.sender
            self._answer(known)  # It has asked again before it heard the first answer.
            return
        if known is not None and known.incarnation >= member.incarnation:
            self._refuse(message.sender, f"{member} was registered already, or has been replaced")
            return
        if known is not None and role == WORKER and self._roster.sealed:
            self._forget_worker(identity)
        self._roster.add(member)
        self._promised.pop((role, identity), None)
        if role == SERVER and self._ended is None:
            # A server that another replaces without having been missed has lost its state all the same.
            self._roster.lost_servers.discard(identity)
            member.since = self._roster.number + 1
            self._publish()
        else:
            self._answer(member)

    def _answer(self, member: Member) -> None:
        if self._ended is not None:
            self._roster.tell(member, self._ended)
        else:
            self._roster.send_view(member)

    def _member_of(self, message: Message) -> Member | None:
        member = self._roster.find(message.string("role"), message.integer("id"))
        if member is None or member.incarnation != message.integer("incarnation"):
            self._refuse_the_dead(message)
            return None
        return member

    def _refuse_the_dead(self, message: Message) -> None:
        self._refuse(
            message.sender,
            f"{message.string('role')} {message.integer('id')} was silent for {self._settings.timeout:g} s and "
            "counts as dead: the run goes on without it; raise `timeout` if it was only busy",
        )

    def _beat(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        member.seen = time.monotonic()
        member.acknowledged = message.integer("seen")
        member.connection = message.sender  # another one after a cut, which may have lost what was told
        for name, value in message.fields.get("notices", {}).items():
            self._keep_notice(name, value)
        self._roster.tell(member, Message("pong", {"number": self._roster.number, "notices": self._notices}))
        if self._ended is not None:
            self._roster.tell(member, self._ended)
        elif message.integer("here") < self._roster.number:
            self._roster.send_view(member)
        self._rounds.release()

    def look_for_the_silent(self) -> None:
        """Take out the members that gave no sign of life; to be called several times a second."""
        silent = self._roster.silent(self._settings.timeout)
        if self._ended is not None:
            return
        for member in silent:
            how = f"was silent for {self._settings.timeout:g} s"
            self._silent.append([member.role, member.id, member.incarnation])
            # The supervision asks for the silent, ends them, and says whether another takes their place: in a moment,
            # unless it is gone itself.
            if self._settings.supervised:
                self._promise(member, how, min(self._settings.timeout, CONFIRM_SECONDS), "nobody took its place")
            self._lose(member, how, replaced=self._settings.supervised)
        for place, (until, member, how) in list(self._promised.items()):
            if time.monotonic() > until:
                del self._promised[place]
                self._lose(member, how, replaced=False)
        seconds = max(6 * self._settings.timeout, TAKE_UP_SECONDS)
        if (reason := self._rounds.held_too_long(seconds, self._settings.appear)) is not None:
            self._finish(reason)
        if not self._roster.sealed and time.monotonic() - self._began > self._settings.appear:
            missing = self._roster.missing()
            if missing:
                self._finish(f"{', '.join(missing)} did not appear within {self._settings.appear:g} s")

    def _promise(self, member: Member, how: str, seconds: float, otherwise: str) -> None:
        """Another will take the place of one that is gone, or it counts as gone for good after some seconds."""
        until = time.monotonic() + seconds
        self._promised[member.role, member.id] = until, member, f"{how}, and {otherwise} within {seconds:g} s"

    def _died(self, message: Message) -> None:
        self._reply(message, Message("heard"))
        role, identity = message.string("role"), message.integer("id")
        member = self._roster.find(role, identity)
        incarnation = message.integer("incarnation")
        if member is None or member.incarnation != incarnation:
            # It had not registered yet, or was lost already; what matters is whether it comes back.
            member = Member(role, identity, incarnation, message.integer("process"), "this node", b"", 0.0)
        how, replaced = message.string("how"), message.flag("replaced")
        current = self._roster.find(role, identity)
        if current is not None and current.incarnation != incarnation:
            return  # It was told before, and another is there.
        self._promised.pop((role, identity), None)
        if replaced:
            self._promise(member, how, coordinator_settings.RESTART_SECONDS, "the one in its place did not appear")
        self._lose(member, how, replaced)

    def _lose(self, member: Member, how: str, replaced: bool) -> None:
        current = self._roster.find(member.role, member.id)
        if current is not None and current.incarnation == member.incarnation:
            self._roster.remove(current)
        elif current is not None:
            return
        if member.role == WORKER:
            in_group = member.id in self._roster.group
            if not self._roster.sealed:
                if not replaced:
                    when = " before training began" if self._settings.servers else ", and every worker is needed here"
                    self._finish(f"{member} {how}{when}")
                self._rounds.forget(member.id)
                return
            self._forget_worker(member.id)
            if not replaced and member.id in self._settings.essential:
                self._finish(f"{member}, which writes checkpoints and logs, {how}: with max_restarts it would return")
            elif in_group and not self._roster.group:
                self._finish(f"{member} {how}, and no worker is left")
        elif member.role == SERVER:
            self._roster.lost_servers.add(member.id)
            if self._roster.copies_are_left:
                self._publish()  # Its copies take over; if it returns, it is a new one.
            elif not replaced:
                self._finish(
                    f"{member} {how}: its parameters are lost; with replication: 2 or snapshots a run survives this"
                )

    def _forget_worker(self, identity: int) -> None:
        self._rounds.forget(identity)
        if identity not in self._roster.group:
            return
        self._roster.group.discard(identity)
        self._dispatcher.lose(identity)
        self._publish()
        self._rounds.complete()
        if (reason := self._rounds.over) is not None:
            self._finish(reason)

    def _publish(self) -> None:
        self._roster.publish()
        self._rounds.release()

    def _leave(self, message: Message) -> None:
        self._reply(message, Message("left"))
        member = self._roster.find(message.string("role"), message.integer("id"))
        if member is None or member.incarnation != message.integer("incarnation"):
            return
        self._roster.remove(member)
        if member.role == WORKER:
            self._forget_worker(member.id)
            if not self._roster.group:
                self._finish("the session is over: every worker has left", clean=True)

    # Collectives

    def _collect(self, message: Message) -> None:
        member = self._member_of(message)
        if member is not None:
            trouble = self._rounds.collect(member, message)
            if trouble is not None:
                self._finish(trouble)

    # Data

    def _epoch(self, message: Message) -> None:
        if self._member_of(message) is not None:
            self._dispatcher.begin(message.integer("epoch"), message.integer("samples"), message.integer("chunk"))
            self._reply(message, Message("epoch", {"epoch": message.integer("epoch")}))

    def _take(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        chunk = self._dispatcher.take(
            member.id,
            message.integer("epoch"),
            message.integer("processed"),
            self._roster.group,
            message.integer("ordinal"),
        )
        fields = {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop, "ordinal": message.integer("ordinal")}
        self._reply(message, Message("chunk", fields))

    # The end

    def _end(self, message: Message) -> None:
        self._reply(message, Message("heard"))
        self._finish(message.string("message")[:4000], clean=message.flag("clean"))

    def _finish(self, text: str, clean: bool = False) -> None:
        """Tell everyone that the run is over, and why."""
        if self._ended is not None:
            return
        self._ended = Message("ended", {"message": text, "clean": clean})
        self._roster.tell_all(self._ended)

    def _notice(self, message: Message) -> None:
        self._keep_notice(message.string("name"), message.integer("value"))
        self._roster.tell_all(Message("notice", {"name": message.string("name"), "value": message.integer("value")}))

    def _keep_notice(self, name: object, value: object) -> None:
        """The first value of a name; every answer to a sign of life repeats them."""
        if isinstance(name, str) and len(name) < 64 and type(value) is int and len(self._notices) < MOST_NOTICES:
            self._notices.setdefault(name, value)

    def _refuse(self, connection: bytes, text: str) -> None:
        self._send(Message("ended", {"message": text, "clean": False}, (), connection))

    def _stop(self, message: Message) -> None:
        self._reply(message, Message("heard"))
        self.stopped = True

    def _status(self, message: Message) -> None:
        ended = None if self._ended is None else self._ended.fields
        self._reply(message, Message("status", {"silent": self._silent, "ended": ended}))

    def _reply(self, request: Message, message: Message) -> None:
        self._send(Message(message.kind, message.fields, message.frames, request.sender))
