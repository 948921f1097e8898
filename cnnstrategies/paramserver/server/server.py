"""The role of a server: it holds slices of the parameters, makes the optimizer's steps on them, and replies to pulls.

Every check of a received message raises an ``InvalidMessageError`` or a ``ControlError`` if the message is invalid. The
server then drops the whole message.
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
    OutdatedMessageError,
    Say,
    fields_of,
    pack_keys,
    unpack_json,
    unpack_keys,
)
from cnnstrategies.paramserver.optimizers import check_options
from cnnstrategies.paramserver.server.asynchronous import Asynchronous
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.pushes import Begin
from cnnstrategies.paramserver.server.senders import Outbox, Senders
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.store import MemberKey, Store
from cnnstrategies.paramserver.server.synchronous import Synchronous
from cnnstrategies.paramserver.specification import Options, Specification


class Server:
    """State machine of a server. It does not use sockets, threads, clocks or files.

    The methods :meth:`follow`, :meth:`on_message`, :meth:`on_time`, :meth:`flush` and :meth:`work` return effects,
    which the driver carries out. The driver calls :meth:`follow` with each new view before it passes on more messages,
    because the server drops messages from senders that are not in its view. The driver calls :meth:`on_time` several
    times a second, :meth:`flush` after it has read all waiting messages, and :meth:`work` as long as :attr:`busy` is
    true.

    Args:
        specification: The run's specification.
        id: Number of this server, from 0 to `Specification.servers` - 1.
        store: The slices' values and optimizers.
        encrypted: Whether the connections are encrypted.

    Attributes:
        id: Number of this server.
        view: The newest view that this server has received; its number is -1 before the first view.
        mode: The state machine that determines when gradients are applied.
        shard: The slices, with the pulls that wait for new values.
        store: The slices' values and optimizers.
        dropped: By reason: number of dropped messages.
    """

    def __init__(self, specification: Specification, id: int, store: Store, encrypted: bool = False) -> None:
        self.id = id
        self.view = View(-1, (), ())
        self.store = store
        self.dropped: Counter[str] = Counter()
        self._specification = specification
        self._outbox = Outbox(id, specification.session)
        shard = self.shard = Shard(specification, id, self._outbox, store)
        self._synchronous = Synchronous(specification, shard, id, self._outbox) if specification.aggregates else None
        self._asynchronous = None if specification.aggregates else Asynchronous(specification, shard)
        mode = self._synchronous or self._asynchronous
        assert mode is not None
        self.mode: Synchronous | Asynchronous = mode
        self._senders = Senders(id, encrypted, specification.timeout)
        self._text = b""  # the last received JSON text with hyperparameters
        self._options: Options = []  # the hyperparameters in that text
        self._handlers: dict[Kind, Callable[[int, Header, memoryview], None]] = {
            Kind.HELLO: self._hello,
            Kind.VALUE: self._initialise,
            Kind.BEGIN: self._begin,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.RELAY: self._take_relay,
            Kind.ACKNOWLEDGE: lambda server, header, payload: shard.acknowledged(server, header.key, header.base),
            Kind.COPY: self._take_copy,
            Kind.PING: self._take_ping,
        }

    @property
    def busy(self) -> bool:
        """Whether at least one slice of the decided step is ready for :meth:`work`."""
        return self._synchronous is not None and self._synchronous.busy

    @property
    def routes(self) -> Mapping[int, bytes]:
        """ZeroMQ routing ids of the workers' connections, by worker id.

        Each routing id belongs to the connection on which the worker's last message arrived.
        """
        return self._outbox.routes

    def admits(self, key: str) -> bool:
        """Return whether a connection with a public key may be accepted, because a member of the view has this key."""
        return self._senders.has_key(key)

    def follow(self, now: float, view: View) -> Effects:
        """Act on a new view. A view that is not newer than this server's view is ignored."""
        self._senders.liveness.pass_to(now)
        if view.number <= self.view.number:
            return []
        before, since = (
            {server.id: server.since for server in servers} for servers in (self.view.servers, view.servers)
        )
        if self.id in before and self.id not in since:
            reason = (
                f"server {self.id} is no longer in the view (number {view.number}): the coordinator counts it as dead, "
                "so this process ends and another process takes its place"
            )
            return [End(reason, False)]
        self.view = view
        if self.id not in before and self.id in since and self.store.changes is not None:
            self.store.changes.set_origin(since[self.id])
        self._senders.follow(view)
        self._outbox.follow(view)
        own_keys_before = self.shard.own_key_set
        self.shard.place(view)
        self.mode.follow(view)
        if self.shard.own_key_set - own_keys_before:
            for worker in list(self._outbox.routes):
                # This server has just become the primary of more slices. Until now it has dropped the workers' messages
                # about these slices, so the workers must repeat the messages.
                self._outbox.ask_again(worker)
        return self._outbox.take()

    def on_message(self, now: float, route: bytes, user: str, header: Header, payload: memoryview) -> Effects:
        """Act on a received message. Drop the message if it is invalid, or if the sender may not send it.

        Args:
            now: The current time, in seconds.
            route: ZeroMQ routing id of the connection on which the message arrived.
            user: Public key of the connection, if it is encrypted.
            header: Header of the message.
            payload: Payload of the message.
        """
        self._senders.liveness.pass_to(now)
        try:
            peer = self._check_sender(route, user, header)
            self.handle(peer, header, payload)
        except OutdatedMessageError as error:
            self.dropped[str(error)] += 1
        except InvalidMessageError as error:
            self.drop(str(error))
        except ControlError:
            # The error's text may contain received data. Each reason has a counter, so a reason must be a fixed text.
            self.drop(f"a {header.kind.name} message has missing or invalid fields")
        return self._outbox.take()

    def on_time(self, now: float) -> Effects:
        """Send heartbeats to workers and pings to servers, if they are due. End a roll call that has lasted too long.

        A ping contains the number of gaps that this server has found in the receiver's messages. The ping's sequence
        number also shows the receiver whether messages of this server were lost before the ping.
        """
        self._senders.liveness.pass_to(now)
        for worker in self._senders.heartbeats_due():
            # While a worker sends a large amount of data, the replies to its other messages arrive late. Heartbeats
            # show the worker in the meantime that this server is alive.
            self._outbox.to_worker(worker, Kind.PING)
        for server in self._senders.pings_due():
            self._outbox.to_server(server, Kind.PING, base=self._senders.gaps(server))
        if self.mode.roll.expire(self._senders.liveness.now):
            self.mode.proceed()
        return self._outbox.take()

    def flush(self) -> Effects:
        """Report complete pushes to the leader.

        The driver calls this after it has passed on all waiting messages, so that one report covers several pushes.
        """
        if self._synchronous is not None:
            self._synchronous.flush()
        return self._outbox.take()

    def work(self) -> Effects:
        """Process one slice of the decided step. Call this only while :attr:`busy` is true."""
        if self._synchronous is not None:
            self._synchronous.work()
        return self._outbox.take()

    def drop(self, reason: str) -> None:
        """Count a dropped message by the reason, and log the message if it is the first message with this reason."""
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            text = (
                f"server {self.id} dropped a message: {reason}; later messages dropped for this reason are only counted"
            )
            self._outbox.effects.append(Say(text, False))

    def _check_sender(self, route: bytes, user: str, header: Header) -> int:
        """Check that the sender may send a message, and record the time and the route of the message.

        Returns the sender's id, which is its number among the workers or among the servers.

        Raises:
            InvalidMessageError: The sender may not send this message.
        """
        peer = header.sender & ~SERVER
        has_gap = self._senders.check(header, user)
        if header.sender >= SERVER:
            if has_gap:
                self._outbox.to_server(peer, Kind.PING, base=self._senders.gaps(peer))
            return peer
        before = self._outbox.routes.get(peer, route)
        self._outbox.routes[peer] = route
        if before != route:
            # Replies that were sent on the old connection may be lost, so the worker must repeat its messages.
            self._outbox.ask_again(peer)
        return peer

    def handle(self, peer: int, header: Header, payload: memoryview) -> None:
        """Act on a message whose sender was checked.

        Args:
            peer: Id of the sender, which is a worker or a server, depending on the kind of the message.
            header: Header of the message.
            payload: Payload of the message.

        Raises:
            ControlError: The message is invalid.
        """
        handler = self._handlers.get(header.kind)
        if handler is not None:
            handler(peer, header, payload)
        elif self._synchronous is not None:
            self._synchronous.on_server_message(peer, header, fields_of(payload, header))

    # Messages from workers

    def _hello(self, worker: int, header: Header, payload: memoryview) -> None:
        """Act on a HELLO message, and reply with WELCOME.

        This server does not reply in two cases: it does not have the worker's view yet; or the worker is a newcomer,
        and this server does not know the other workers' steps yet. The worker then repeats the message.
        """
        if header.base > self.view.number:
            return  # The worker has a newer view, and repeats the HELLO until this server also has the newer view.
        message, answered = fields_of(payload, header), frozenset(unpack_keys(payload[header.meta :]))
        member, step = (worker, header.incarnation), None if header.step == NO_STEP else header.step
        joins, first, has_parameters = message.flag("joins"), message.integer("first"), message.flag("given")
        request, gradients_step = (
            None if message.fields.get(name) is None else message.integer(name) for name in ("request", "has")
        )
        if message.flag("leaves"):
            self.mode.leave(worker)
        lacks = False
        if step is not None:
            if not has_parameters and self._synchronous is not None and self._synchronous.cannot_make(step - 1):
                # No worker can push gradients of the step that this server has missed. The step must not count as
                # missing, because the newcomer would then wait forever.
                answered = self.shard.own_key_set
            # A newcomer without values waits for the values with which its first step begins. These values result from
            # the previous step, which may not be applied here yet, so only the steps before that step must be applied.
            lacks = self._lacks_updates(member, step if has_parameters else step - 1, answered, first)
            if self._asynchronous is not None:
                self._asynchronous.note_first_step(member, first)
        # A newcomer's first HELLO contains no step, so the reply must contain the step with which the newcomer begins.
        first_step: int | None = 0
        if joins:
            first_step = (
                self._synchronous.join(worker, step, gradients_step)
                if self._synchronous is not None
                else self.mode.join(worker, step)
            )
        self.mode.note_position(worker)
        if first_step is None:
            return  # The worker repeats the HELLO until this server knows the other workers' steps.
        reply = {
            "ready": self.shard.ready and not lacks,
            "lost": self._values_lost,
            "leader": self._synchronous is None or self._synchronous.leads,
            "asked": header.sequence,
            # Either the connections with these servers are broken, or the servers have registered but do not serve yet.
            # They are not dead, because by this time a dead server has been removed from the view.
            "deaf": self._senders.liveness.silent(self._specification.deaf_after),
            "held": request is not None,
        }
        # Keys of the slices whose push and pull the worker need not send again, because both have arrived here.
        settled_keys = (
            []
            if request is None
            else [key for key in self.shard.own_keys if self.mode.will_answer(key, member, request)]
        )
        self._outbox.to_worker(
            worker, Kind.WELCOME, pack_keys(settled_keys), step=first_step, json=reply, encoding=Encoding.KEYS
        )

    @property
    def _values_lost(self) -> bool:
        """Whether this server has lost the values of a slice whose primary it is.

        This is the case if the slice has no values, although common steps were made.
        """
        return self._synchronous is not None and self._synchronous.clock.step > 0 and not self.shard.ready

    def _lacks_updates(self, member: MemberKey, step: int, answered: frozenset[int], first: int) -> bool:
        """Return whether this server lacks updates that a worker reports as already applied.

        Args:
            member: Id and incarnation of the worker.
            step: Number of the step that the worker is working on: the worker computes the gradients of this step, or
                waits for the values that result from this step.
            answered: Keys of the slices whose values after this step the worker has already received.
            first: The step with which the worker began.
        """
        for key in self.shard.own_keys:
            last = step if key in answered else step - 1
            if self._synchronous is not None:
                lacks = last + 1 > max(0, self.store.versions[key])
            else:
                lacks = last > max(self.store.seen[key].get(member, -1), first - 1)
            if lacks:
                return True
        return False

    def _initialise(self, worker: int, header: Header, payload: memoryview) -> None:
        """Act on a VALUE message, which contains the initial values of a slice.

        If the slice already has values, the message has no effect.
        """
        # If the values of the slice are lost, initial values are refused. Otherwise the training of the slice would
        # start again from the initial values, and the user would not notice.
        if self._values_lost and header.key in self.shard.own_key_set:
            raise InvalidMessageError("the message contains initial values, but common steps were already made")
        before = self.shard.ready
        self.shard.initialise(header, payload)
        if self.shard.ready and not before:
            for known_worker in list(self._outbox.routes):
                # Pushes that arrived before the initial values were dropped, so the workers must send them again.
                self._outbox.ask_again(known_worker)

    def _begin(self, worker: int, header: Header, payload: memoryview) -> None:
        begin = Begin(self._options_in(header, payload), header.weight, self._pull_encoding(header.base), header.level)
        self.mode.begin((worker, header.incarnation), header.step, begin)

    def _pull_encoding(self, encoding: int) -> int:
        """Check an encoding that a worker requests for a pull, and return it.

        Raises:
            InvalidMessageError: The run does not use the encoding for pulls.
        """
        compression, changes = PAYLOADS.get(encoding), self.store.changes
        if compression is not None and compression.lossy:
            valid = changes is not None and encoding == changes.encoding
        else:
            valid = encoding == Encoding.NOTHING or (compression is not None and compression.for_pulls)
        if not valid:
            raise InvalidMessageError("the pull requests an encoding that this run does not use for pulls")
        return encoding

    def _options_in(self, header: Header, payload: memoryview) -> Options:
        """Return the hyperparameters in a message. The JSON text is parsed only if it differs from the last text."""
        text = bytes(payload[: header.meta])
        if text != self._text:
            self._options = check_options(unpack_json(payload, header).get("options"), self._specification.groups)
            self._text = text
        return self._options

    def _push(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.key not in self.shard.own_key_set:
            raise OutdatedMessageError("the push is for a slice whose primary is another server")
        if not self.mode.push((worker, header.incarnation), header, payload):
            self.dropped["a push that has arrived before"] += 1
        if self._specification.pipelined:  # With pipelined steps, each push also requests the slice's new values.
            self.shard.pull(worker, (header.key,), Pull(header.step + 1, header.step + 1))

    def _pull(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.encoding != Encoding.KEYS or len(payload) % 4:
            raise InvalidMessageError("the payload of the pull does not consist of the keys of slices")
        keys = unpack_keys(payload)
        if len(set(keys)) != len(keys):
            raise InvalidMessageError("the pull contains a key twice")
        if not self.shard.own_key_set.issuperset(keys):
            raise OutdatedMessageError("the pull contains the key of a slice whose primary is another server")
        encoding = self._pull_encoding(header.base >> 1)
        self.shard.order_by_use(keys)
        if header.base & 1:
            # In common steps, the values for a newcomer must not be older than the values that the other workers use
            # for the newcomer's first step. So the reply waits for the version with the number of that step.
            version = 0 if self._synchronous is None else header.step
            pull = Pull(header.step, version, whole=True, state=header.level > 0, question=header.question)
            self.shard.pull(worker, keys, pull)
        elif self._asynchronous is not None:
            self._asynchronous.pull((worker, header.incarnation), keys, header.step, encoding)
        else:
            self.shard.pull(worker, keys, Pull(header.step, header.step, encoding=encoding, mark=header.weight))

    # Messages from other servers

    def _take_relay(self, server: int, header: Header, payload: memoryview) -> None:
        message, update = fields_of(payload, header), payload[header.meta :]
        decision = None if self._synchronous is None else Decision.from_message(message, self._specification)
        options = self._options_in(header, payload) if decision is None else decision.options
        self.shard.copies.relayed(server, header, update, options, message.integer("absent"))
        if self._synchronous is not None and decision is not None:
            self._synchronous.adopt(decision)

    def _take_copy(self, server: int, header: Header, payload: memoryview) -> None:
        message: Message = fields_of(payload, header)
        decided = message.part("decided")
        decision = None if decided is None else Decision.from_message(decided, self._specification)
        self.shard.copies.copied(server, header, message, payload[header.meta :])
        if self._synchronous is not None and decision is not None:
            self._synchronous.adopt(decision)

    def _take_ping(self, server: int, header: Header, payload: memoryview) -> None:
        if self._senders.must_repeat(server, header.base):
            self.shard.copies.repeat_for(server)
            if self._synchronous is not None:
                self._synchronous.repeat_for(server)
