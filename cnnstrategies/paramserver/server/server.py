"""A server: holds slices of the parameters, applies the optimizer to them, and answers pulls.

Whatever finds that a message does not fit raises an ``InvalidMessageError``; the message is dropped then, as a whole.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from cnnstrategies.paramserver.compression import PAYLOADS
from cnnstrategies.paramserver.core.node import ControlError, End, Message
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    SERVER,
    Effects,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    Say,
    fields_of,
    pack_keys,
    unpack_json,
    unpack_keys,
)
from cnnstrategies.paramserver.server.asynchronous import Asynchronous
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.pushes import Begin
from cnnstrategies.paramserver.server.senders import PING_SECONDS, Outbox, Senders
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import Store, Who
from cnnstrategies.paramserver.server.synchronous import Synchronous
from cnnstrategies.paramserver.specification import Options, Specification, check_options

STOPPED_SECONDS = 1.0  # between two looks: then this process was stopped


class Server:
    """One server of a run, without sockets, threads, clocks and files: all methods return what is to be done.

    Its driver calls :meth:`follow` before it hands over messages, for those of members of a newer view are dropped;
    :meth:`on_time` several times a second; :meth:`flush` when it has read what was waiting; and :meth:`work` as long as
    :attr:`busy`.

    Attributes:
        id: This server's place.
        mode: Applies the updates.
        shard: What the server knows of its slices, the pushes and the workers.
        dropped: How many messages were dropped, by reason.
    """

    def __init__(self, specification: Specification, id: int, store: Store, encrypted: bool = False) -> None:
        self.id = id
        self.view = View(-1, (), ())
        self.store = store
        self.dropped: Counter[str] = Counter()
        self._specification = specification
        self._outbox = Outbox(id, specification.session)
        shard = self.shard = Shard(specification, id, self._outbox, store)
        self._common = Synchronous(specification, shard, id, self._outbox) if specification.aggregates else None
        self._own = None if specification.aggregates else Asynchronous(specification, shard)
        mode = self._common or self._own
        assert mode is not None
        self.mode: Synchronous | Asynchronous = mode
        self._senders = Senders(encrypted)
        self._sign_seconds = min(1.0, specification.timeout / 4)
        self._stopped_seconds = min(STOPPED_SECONDS, specification.timeout / 2)
        self._now = 0.0
        self._pinged = self._gave_sign = 0.0
        self._heard: dict[int, float] = {}  # when each other server was
        self._heard_workers: set[int] = set()
        self._text = b""
        self._options: Options = []
        self._handlers: dict[Kind, Callable[[int, Header, memoryview], None]] = {
            Kind.HELLO: self._hello,
            Kind.VALUE: self._initialise,
            Kind.BEGIN: self._begin,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.RELAY: self._relayed,
            Kind.ACKNOWLEDGE: lambda server, header, payload: shard.acknowledged(server, header.key, header.base),
            Kind.COPY: self._copied,
            Kind.PING: self._asked,
        }

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self._common is not None and self._common.busy

    @property
    def routes(self) -> Mapping[int, bytes]:
        """Of each worker, the route on which something may be sent."""
        return self._outbox.routes

    def admits(self, key: str) -> bool:
        """Whether a key belongs to a member."""
        return self._senders.have(key)

    # What happens

    def follow(self, now: float, view: View) -> Effects:
        """Go on with a view, if it is newer."""
        self._goes_on(now)
        if view.number <= self.view.number:
            return []
        before, since = ({server.id: server.since for server in one.servers} for one in (self.view, view))
        if self.id in before and self.id not in since:
            reason = (
                f"server {self.id} is no longer in the view (number {view.number}): it was taken for dead and another "
                "takes its place"
            )
            return [End(reason, False)]
        self.view = view
        if self.id not in before and self.id in since and self.store.changes is not None:
            self.store.changes.begin_with(since[self.id])
        self._senders.follow(view)
        self._outbox.follow(view)
        owned = self.shard.owned
        self.shard.place(view)
        self.mode.follow(view)
        if self.shard.owned - owned:
            for worker in list(self._outbox.routes):
                self._outbox.ask_again(worker)  # What it has sent here before this view was dropped.
        self._heard = {
            server: self._heard.get(server, now) if before.get(server) == number else now
            for server, number in since.items()
            if server != self.id
        }
        return self._outbox.take()

    def on_message(self, now: float, route: bytes, user: str, header: Header, payload: memoryview) -> Effects:
        """Act on a message, not checked against the view yet, that came by a route from who has a key, if encrypted."""
        self._goes_on(now)
        try:
            peer = self._take(route, user, header)
            self.handle(peer, header, payload)
        except InvalidMessageError as error:  # What else is raised is no message's fault, but this package's.
            self.drop(str(error))
        except ControlError:  # Its text holds what has come.
            self.drop(f"a {header.kind.name} with other fields")
        return self._outbox.take()

    def on_time(self, now: float) -> Effects:
        """Do what is due.

        Now and then other servers are told what has been missed of theirs; it also shows them what they missed.
        """
        self._goes_on(now)
        if now - self._gave_sign > self._sign_seconds:
            self._gave_sign = now
            for worker in self._heard_workers:  # A sign of life: who sends much is answered late.
                self._outbox.to_worker(worker, Kind.PING)
            self._heard_workers.clear()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._senders.pinged()
            for server in self._heard:
                self._outbox.to_server(server, Kind.PING, base=self._senders.gaps(server))
        if self.mode.roll.expire(now):
            self.mode.proceed()
        return self._outbox.take()

    def flush(self) -> Effects:
        """All that was waiting has been read."""
        if self._common is not None:
            self._common.flush()
        return self._outbox.take()

    def work(self) -> Effects:
        """Do one of the things that are left to be done."""
        if self._common is not None:
            self._common.work()
        return self._outbox.take()

    def drop(self, reason: str) -> None:
        """Count a message that was of no use."""
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            text = f"server {self.id} dropped a message: {reason}; further ones are only counted"
            self._outbox.effects.append(Say(text, False))

    def _take(self, route: bytes, user: str, header: Header) -> int:
        """Check who has sent a message, and note that it was heard; its sender's number."""
        peer = header.sender & ~SERVER
        if header.sender >= SERVER and self._senders.are_joined(header, user):
            self._heard[peer] = self._now  # Also while it follows a view that this server has not heard of yet.
        missed = self._senders.check(header, user)
        if header.sender >= SERVER:
            if missed:
                self._outbox.to_server(peer, Kind.PING, base=self._senders.gaps(peer))
            return peer
        self._heard_workers.add(peer)
        before = self._outbox.routes.get(peer, route)
        self._outbox.routes[peer] = route
        if before != route:
            # Answers on the old connection may be lost: have the worker send again what is not answered.
            self._outbox.ask_again(peer)
        return peer

    def handle(self, peer: int, header: Header, payload: memoryview) -> None:
        """Act on a message of a worker or a server, by its number, that was checked."""
        handler = self._handlers.get(header.kind)
        if handler is not None:
            handler(peer, header, payload)
        elif self._common is not None:
            self._common.from_server(peer, header, fields_of(payload, header))

    def _goes_on(self, now: float) -> None:
        """Note the time. It is looked at several times a second, unless this process is stopped."""
        passed = now - self._now
        self._now = now
        if passed > self._stopped_seconds:  # Then the others were not silent.
            self._heard = {server: min(heard + passed, now) for server, heard in self._heard.items()}
            self.mode.roll.stopped(passed)

    # Of workers

    def _hello(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.base > self.view.number:
            return  # It knows a newer view, and asks again until this server does too.
        said, answered = fields_of(payload, header), frozenset(unpack_keys(payload[header.meta :]))
        who, step = (worker, header.incarnation), None if header.step == NO_STEP else header.step
        joins, first, given = said.flag("joins"), said.integer("first"), said.flag("given")
        request, has = (None if said.fields.get(one) is None else said.integer(one) for one in ("request", "has"))
        if said.flag("leaves"):
            self.mode.leave(worker)
        lacks = False
        if step is not None:
            if not given and self._common is not None and self._common.is_missed(step - 1):
                answered = self.shard.owned  # As if it were there: a newcomer cannot push it, and would wait for ever.
            # A newcomer waits for the step before its first: that one is decided, and maybe not applied yet.
            lacks = self._lacks(who, step if given else step - 1, answered, first)
            if self._own is not None:
                self._own.met(who, first)
        # Only a question, at first: a newcomer becomes a member when it says from which step on.
        begins: int | None = 0
        if joins:
            begins = self._common.join(worker, step, has) if self._common is not None else self.mode.join(worker, step)
        self.mode.here(worker)
        if begins is None:
            return  # It asks again until this server knows where the others are.
        answer = {
            "ready": self.shard.ready and not lacks,
            "lost": self._values_lost,
            "leader": self._common is None or self._common.leader == self.id,
            "asked": header.sequence,
            "deaf": self._deaf(),
            "held": request is not None,
        }
        # What it will get without asking again: its pull and the push before it are here.
        held = [] if request is None else [key for key in self.shard.own if self.mode.holds(key, who, request)]
        self._outbox.to_worker(worker, Kind.WELCOME, pack_keys(held), step=begins, json=answer, encoding=Encoding.KEYS)

    def _deaf(self) -> list[int]:
        """The servers of the view of which nothing has come for too long: a dead one is out of the view by then."""
        limit = self._now - self._specification.deaf_after
        return [server for server, heard in self._heard.items() if heard < limit]

    @property
    def _values_lost(self) -> bool:
        """Whether all who had values of own slices have died: steps are known to be made."""
        return self._common is not None and self._common.clock.step > 0 and not self.shard.ready

    def _lacks(self, who: Who, step: int, answered: frozenset[int], first: int) -> bool:
        """Whether own slices lack updates that a worker knows of.

        It works on a step, or waits for its answers, of which some slices are answered: it pushes and pulls them no
        more. `first` is the step that it has begun with.
        """
        for key in self.shard.own:
            last = step if key in answered else step - 1
            if self._common is not None:
                lacks = last + 1 > max(0, self.store.versions[key])
            else:
                lacks = last > max(self.store.seen[key].get(who, -1), first - 1)
            if lacks:
                return True
        return False

    def _initialise(self, worker: int, header: Header, payload: memoryview) -> None:
        if self._values_lost and header.key in self.shard.owned:
            raise InvalidMessageError("a first value although steps were made")  # With it the run would begin anew.
        before = self.shard.ready
        self.shard.initialise(header, payload)
        if self.shard.ready and not before:
            for known in list(self._outbox.routes):
                self._outbox.ask_again(known)  # What came too early was dropped.

    def _begin(self, worker: int, header: Header, payload: memoryview) -> None:
        begin = Begin(self._options_in(header, payload), header.weight, self._pulled(header.base), header.level)
        self.mode.begin((worker, header.incarnation), header.step, begin)

    def _pulled(self, encoding: int) -> int:
        """Return the encoding in which a worker pulls, if the server can answer in it."""
        compression, changes = PAYLOADS.get(encoding), self.store.changes
        if compression is not None and compression.lossy:
            valid = changes is not None and encoding == changes.encoding
        else:
            valid = encoding == Encoding.NOTHING or (compression is not None and compression.for_pulls)
        if not valid:
            raise InvalidMessageError("a pull in an encoding that parameters do not have")
        return encoding

    def _options_in(self, header: Header, payload: memoryview) -> Options:
        """A message's hyper-parameters: mostly those of the last one, since all workers have the same."""
        text = bytes(payload[: header.meta])
        if text != self._text:
            self._options = check_options(unpack_json(payload, header).get("options"), self._specification.groups)
            self._text = text
        return self._options

    def _push(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.key not in self.shard.owned:
            raise InvalidMessageError("a push of a slice that another server is the primary of")
        if not self.mode.push((worker, header.incarnation), header, payload):
            self.dropped["a push that is here already"] += 1
        if self._specification.pipelined:  # It asks for its answer, too.
            self.shard.pull(worker, (header.key,), Pull(header.step + 1, header.step + 1))

    def _pull(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.encoding != Encoding.KEYS or len(payload) % 4:
            raise InvalidMessageError("a pull without keys")
        keys = unpack_keys(payload)
        if len(set(keys)) != len(keys) or not self.shard.owned.issuperset(keys):
            raise InvalidMessageError("a pull of slices that another server is the primary of")
        encoding = self._pulled(header.base >> 1)
        self.shard.use(keys)
        if header.base & 1:
            # A newcomer to common steps begins with what the others have.
            version = 0 if self._common is None else header.step
            pull = Pull(header.step, version, whole=True, state=header.level > 0, question=header.question)
            self.shard.pull(worker, keys, pull)
        elif self._own is not None:
            self._own.pull((worker, header.incarnation), keys, header.step, encoding)
        else:
            self.shard.pull(worker, keys, Pull(header.step, header.step, encoding=encoding, mark=header.weight))

    # Of other servers

    def _relayed(self, server: int, header: Header, payload: memoryview) -> None:
        said, update = fields_of(payload, header), payload[header.meta :]
        decision = None if self._common is None else Decision.of(said, self._specification)
        options = self._options_in(header, payload) if decision is None else decision.options
        self.shard.copies.relayed(server, header, update, options, said.integer("absent"))
        if self._common is not None and decision is not None:
            self._common.adopt(decision)

    def _copied(self, server: int, header: Header, payload: memoryview) -> None:
        said: Message = fields_of(payload, header)
        decided = said.part("decided")
        decision = None if decided is None else Decision.of(decided, self._specification)
        self.shard.copies.copied(server, header, said, payload[header.meta :])
        if self._common is not None and decision is not None:
            self._common.adopt(decision)

    def _asked(self, server: int, header: Header, payload: memoryview) -> None:
        if self._senders.asked(server, header.base):
            self.shard.copies.tell_again(server)
            if self._common is not None:
                self._common.tell_again(server)
