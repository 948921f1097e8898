"""The coordinator: who takes part, and what all of them must agree on. ps-lite calls it the scheduler.

One small process. Servers and workers register here and send heartbeats; they receive numbered views of the
membership, and workers gather small values through it. Collectives are numbered, and each is complete when every
worker of the group has contributed, or has left or died: a death ends nobody's wait for ever.

A worker that is started again takes part in the set-up by replaying it: the results of all collectives up to the
start of training are kept, so what it is told is what the others were told. It is let into the group at the next
boundary, a collective at which nobody is in the middle of a step, once every server has seen the view with it.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import zmq

from cnnstrategies.paramserver.codec import Buffer
from cnnstrategies.paramserver.control import LARGEST_MESSAGE, ControlError, Message, parse, send
from cnnstrategies.paramserver.dispatch import Dispatcher
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair
from cnnstrategies.paramserver.view import ServerInfo, View, WorkerInfo

SERVER, WORKER = "server", "worker"
ROLES = (SERVER, WORKER)


@dataclass(frozen=True)
class CoordinatorSettings:
    """What a coordinator is started with.

    Attributes:
        endpoint: Where it listens.
        workers: How many it waits for.
        servers: How many it waits for; 0 where nothing is trained.
        timeout: Seconds without a heartbeat after which a member counts as dead.
        appear: Seconds in which every member must have registered once.
        survivable: How many servers can be lost for ever: copies of each slice beyond the first.
        essential: Workers whose loss for ever ends the run: the one that writes checkpoints and logs.
        supervised: Whether a supervision may replace processes that were silent, and says if it does.
    """

    endpoint: str
    workers: int
    servers: int
    timeout: float = 10.0
    appear: float = 600.0
    survivable: int = 0
    essential: tuple[int, ...] = (0,)
    supervised: bool = False


@dataclass
class _Member:
    role: str
    id: int
    incarnation: int
    process: int
    host: str
    connection: bytes
    seen: float
    endpoint: str = ""
    public_key: str = ""
    acknowledged: int = -1
    since: int = 0

    def __str__(self) -> str:
        return f"{self.role} {self.id} (process {self.process} on {self.host})"


@dataclass
class _Contribution:
    connection: bytes
    sequence: int
    operation: str
    frames: Sequence[Buffer]


@dataclass
class _Result:
    ids: list[int]
    sizes: list[int]
    frames: list[Buffer] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)


class Coordinator:
    """Registration, views, collectives and chunks of data for one run; see the module's text.

    Args:
        settings: Numbers and the endpoint.
        keys: The run's CURVE keys: only processes that have them too are let in. None for no encryption.
    """

    def __init__(self, settings: CoordinatorSettings, keys: KeyPair | None = None) -> None:
        self.settings = settings
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._gatekeeper = None
        if keys is not None:
            public = keys.public
            self._gatekeeper = Gatekeeper(self._context, lambda key: key == public)
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
            self._socket.zap_domain = b"cnnstrategies"
        self._socket.bind(settings.endpoint)
        self.endpoint = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self.dropped = 0
        self._members: dict[tuple[str, int], _Member] = {}
        self._lost_servers: set[int] = set()
        self._group = set(range(settings.workers))
        self._began = self._running = time.monotonic()
        self._number = 0
        self._sequence = 0
        self._log: list[_Result] = []
        self._sealed = False
        self._pending: dict[int, _Contribution] = {}
        self._flags: tuple[bool, bool] = (False, False)
        self._joiners: dict[int, bytes] = {}
        self._held: list[tuple[int, list[Message]]] = []
        self._values: dict[str, Sequence[Buffer]] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._ended: Message | None = None
        self._stopped = False
        self._silent: list[list[str | int]] = []
        self._dispatcher = Dispatcher()
        self._handlers: dict[str, Callable[[Message], None]] = {
            "hello": self._hello,
            "beat": self._beat,
            "leave": self._leave,
            "collect": self._collect,
            "put": self._put,
            "get": self._get,
            "epoch": self._epoch,
            "take": self._take,
            "died": self._died,
            "end": self._end,
            "stop": self._stop,
            "status": self._status,
            "notice": self._notice,
        }

    def run(self, orphaned: Callable[[], bool] = lambda: False) -> None:
        """Serve until told to stop.

        Args:
            orphaned: Asked several times a second; True ends the service.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.socket, zmq.POLLIN)
        tick = max(0.02, self.settings.timeout / 20)
        while not (self._stopped or orphaned()):
            ready = dict(poller.poll(int(tick * 1000)))
            if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                self._gatekeeper.answer()
            if self._socket in ready:
                for _ in range(200):
                    try:
                        parts = self._socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self.handle(parts)
            self._look_for_the_silent()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(self, parts: Sequence[bytes]) -> None:
        """Act on one message; what is not one is counted and dropped."""
        try:
            message = parse(parts, routed=True)
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ControlError(f"unknown kind {message.kind!r}")
            handler(message)
        except ControlError:
            self.dropped += 1

    # Who is here

    def _hello(self, message: Message) -> None:
        role, identity = message.string("role"), message.integer("id")
        if role not in ROLES or identity >= {SERVER: self.settings.servers, WORKER: self.settings.workers}.get(role, 1):
            self._refuse(
                message.sender,
                f"this run has {self.settings.workers} workers and {self.settings.servers} "
                f"servers: no {role} {identity} is expected",
            )
            return
        member = _Member(
            role,
            identity,
            message.integer("incarnation"),
            message.integer("process"),
            message.string("host")[:255],
            message.sender,
            time.monotonic(),
            message.string("endpoint"),
            message.string("public_key"),
        )
        known = self._members.get((role, identity))
        if known is not None and known.incarnation >= member.incarnation:
            self._refuse(message.sender, f"{member} was registered already, or has been replaced")
            return
        if known is not None and role == WORKER and self._sealed:
            self._forget_worker(identity)
        self._members[role, identity] = member
        if self._ended is not None:
            self._tell(member, self._ended)
        elif role == SERVER:
            # A server that another replaces without having been missed has lost its state all the same.
            self._lost_servers.discard(identity)
            member.since = self._number + 1
            self._publish()
        else:
            self._send_view(member)

    def _member_of(self, message: Message) -> _Member | None:
        member = self._members.get((message.string("role"), message.integer("id")))
        if member is None or member.incarnation != message.integer("incarnation"):
            self._refuse(
                message.sender,
                f"{message.fields['role']} {message.fields['id']} was silent for {self.settings.timeout:g} s and "
                "counts as dead: the run goes on without it; raise `timeout` if it was only busy",
            )
            return None
        return member

    def _beat(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        member.seen = time.monotonic()
        member.acknowledged = message.integer("seen")
        member.connection = message.sender  # another one after a cut, which may have lost what was told
        self._tell(member, Message("pong", {"number": self._number}))
        if self._ended is not None:
            self._tell(member, self._ended)
        elif message.integer("here") < self._number:
            self._send_view(member)
        self._release()

    def _look_for_the_silent(self) -> None:
        now = time.monotonic()
        if now - self._running > 1.0:
            # This process was stopped, not the others silent.
            for member in self._members.values():
                member.seen += now - self._running
        self._running = now
        if self._ended is not None:
            return
        for member in list(self._members.values()):
            if now - member.seen > self.settings.timeout:
                how = f"was silent for {self.settings.timeout:g} s"
                self._silent.append([member.role, member.id, member.incarnation])
                # The supervision asks for the silent, ends them, and says whether another takes their place.
                self._lose(member, how, replaced=self.settings.supervised)
        if not self._sealed and now - self._began > self.settings.appear:
            expected = itertools.chain(
                ((WORKER, number) for number in range(self.settings.workers)),
                ((SERVER, number) for number in range(self.settings.servers)),
            )
            missing = [f"{role} {number}" for role, number in expected if (role, number) not in self._members]
            if missing:
                self._finish(f"{', '.join(missing)} did not appear within {self.settings.appear:g} s")

    def _died(self, message: Message) -> None:
        role, identity = message.string("role"), message.integer("id")
        member = self._members.get((role, identity))
        incarnation = message.integer("incarnation")
        if member is None or member.incarnation != incarnation:
            # It had not registered yet, or was lost already; what matters is whether it comes back.
            member = _Member(role, identity, incarnation, message.integer("process"), "this node", b"", 0.0)
        self._lose(member, message.string("how"), message.flag("replaced"))

    def _lose(self, member: _Member, how: str, replaced: bool) -> None:
        current = self._members.get((member.role, member.id))
        if current is not None and current.incarnation == member.incarnation:
            del self._members[member.role, member.id]
        elif current is not None:
            return
        if member.role == WORKER:
            in_group = member.id in self._group
            if not self._sealed:
                if not replaced:
                    self._finish(f"{member} {how} before training began")
                self._pending.pop(member.id, None)
                return
            self._forget_worker(member.id)
            if not replaced and member.id in self.settings.essential:
                self._finish(f"{member}, which writes checkpoints and logs, {how}: with max_restarts it would return")
            elif in_group and not self._group:
                self._finish(f"{member} {how}, and no worker is left")
        elif member.role == SERVER:
            self._lost_servers.add(member.id)
            if len(self._lost_servers) <= self.settings.survivable:
                self._publish()  # Its copies take over; if it returns, it is a new one.
            elif not replaced:
                self._finish(
                    f"{member} {how}: its parameters are lost; with replication: 2 or snapshots a run survives this"
                )

    def _forget_worker(self, identity: int) -> None:
        self._joiners.pop(identity, None)
        if identity not in self._group:
            return
        self._group.discard(identity)
        self._pending.pop(identity, None)
        self._dispatcher.lose(identity)
        self._publish()
        self._complete()
        self._end_without_group()

    def _end_without_group(self) -> None:
        if self._joiners and not self._group:
            self._finish("training is over: no worker is left that could let in one that was started again")

    def _leave(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        del self._members[member.role, member.id]
        self._reply(message, Message("left"))
        if member.role == WORKER:
            self._forget_worker(member.id)

    # Views

    def _view(self) -> View:
        servers = [m for (role, _), m in sorted(self._members.items()) if role == SERVER]
        workers = [m for (role, i), m in sorted(self._members.items()) if role == WORKER and i in self._group]
        workers = workers if self._sealed else []
        return View(
            self._number,
            tuple(ServerInfo(m.id, m.endpoint, m.public_key, m.since) for m in servers),
            tuple(WorkerInfo(m.id, m.incarnation, m.public_key) for m in workers),
            tuple(sorted(self._lost_servers)) if len(self._lost_servers) <= self.settings.survivable else (),
        )

    def _publish(self) -> None:
        self._number += 1
        for member in self._members.values():
            self._send_view(member)
        self._release()

    def _send_view(self, member: _Member) -> None:
        self._tell(member, Message("view", {"view": self._view().as_dict()}))

    # Collectives

    def _collect(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        sequence, operation = message.integer("sequence"), message.string("operation")
        seal, boundary = message.flag("seal"), message.flag("boundary")
        if self._sealed and seal:
            self._joiners[member.id] = message.sender
            self._end_without_group()
            return
        if sequence < len(self._log):
            self._send_result(message.sender, self._log[sequence], sequence, joined=False)
            return
        if sequence != self._sequence or member.id not in self._group:
            self._finish(f"{member} is at collective {sequence}, {operation}, and the others are at {self._sequence}")
            return
        other = next(iter(self._pending.items()), None)
        if other is not None and other[1].operation != operation:
            self._finish(
                f"worker {other[0]} is at `{other[1].operation}` and worker {member.id} at `{operation}`: every "
                "worker must call the same collectives in the same order"
            )
            return
        self._pending[member.id] = _Contribution(message.sender, sequence, operation, message.frames)
        self._flags = (seal, boundary)
        self._complete()

    def _complete(self) -> None:
        if not self._pending or not self._group <= self._pending.keys():
            return
        seal, boundary = self._flags
        pending, self._pending = dict(sorted(self._pending.items())), {}
        result = _Result(list(pending), [len(one.frames) for one in pending.values()])
        result.frames = [frame for one in pending.values() for frame in one.frames]
        sequence = self._sequence
        self._sequence += 1
        replies = [(one.connection, False) for one in pending.values()]
        if not self._sealed:
            self._log.append(result)
        if seal:
            self._sealed = True
        elif boundary and self._joiners:
            self._group |= self._joiners.keys()
            result.admitted = sorted(self._joiners)
            replies += [(connection, True) for connection in self._joiners.values()]
            self._joiners = {}
        elif not boundary:
            for connection, joined in replies:
                self._send_result(connection, result, sequence, joined)
            return
        if seal or any(joined for _, joined in replies):
            self._publish()
        self._held.append(
            (self._number, [self._result(connection, result, sequence, joined) for connection, joined in replies])
        )
        self._release()

    def _release(self) -> None:
        """Send the results that wait for the servers to have seen a view."""
        servers = [member for (role, _), member in self._members.items() if role == SERVER]
        for number, replies in list(self._held):
            if all(server.acknowledged >= number for server in servers) and len(servers) == self._servers_expected:
                self._held.remove((number, replies))
                for reply in replies:
                    send(self._socket, reply)

    @property
    def _servers_expected(self) -> int:
        return self.settings.servers - len(self._lost_servers)

    def _result(self, connection: bytes, result: _Result, sequence: int, joined: bool) -> Message:
        fields: dict[str, object] = {"sequence": sequence, "ids": result.ids, "sizes": result.sizes, "joined": joined}
        fields |= {"view": self._number, "admitted": result.admitted}
        return Message("result", fields, result.frames, connection)

    def _send_result(self, connection: bytes, result: _Result, sequence: int, joined: bool) -> None:
        send(self._socket, self._result(connection, result, sequence, joined))

    # Values

    def _put(self, message: Message) -> None:
        name = message.string("name")
        if name not in self._values:
            self._values[name] = message.frames
        for connection in self._waiting.pop(name, []):
            send(self._socket, Message("value", {"name": name}, self._values[name], connection))

    def _get(self, message: Message) -> None:
        name = message.string("name")
        if name in self._values:
            self._reply(message, Message("value", {"name": name}, self._values[name]))
        else:
            self._waiting.setdefault(name, []).append(message.sender)

    # Data

    def _epoch(self, message: Message) -> None:
        if self._member_of(message) is not None:
            self._dispatcher.begin(message.integer("epoch"), message.integer("samples"), message.integer("chunk"))
            self._reply(message, Message("epoch", {"epoch": message.integer("epoch")}))

    def _take(self, message: Message) -> None:
        member = self._member_of(message)
        if member is None:
            return
        chunk = self._dispatcher.take(member.id, message.integer("epoch"), message.integer("processed"), self._group)
        self._reply(message, Message("chunk", {"epoch": chunk.epoch, "start": chunk.start, "stop": chunk.stop}))

    # The end

    def _end(self, message: Message) -> None:
        self._finish(message.string("message")[:4000], clean=message.flag("clean"))

    def _finish(self, text: str, clean: bool = False) -> None:
        """Tell everyone that the run is over, and why."""
        if self._ended is not None:
            return
        self._ended = Message("ended", {"message": text, "clean": clean})
        for member in self._members.values():
            self._tell(member, self._ended)

    def _notice(self, message: Message) -> None:
        notice = Message("notice", {"name": message.string("name"), "value": message.integer("value")})
        for member in self._members.values():
            self._tell(member, notice)

    def _refuse(self, connection: bytes, text: str) -> None:
        send(self._socket, Message("ended", {"message": text, "clean": False}, (), connection))

    def _stop(self, message: Message) -> None:
        self._stopped = True

    def _status(self, message: Message) -> None:
        ended = None if self._ended is None else self._ended.fields
        self._reply(message, Message("status", {"silent": self._silent, "ended": ended}))

    def _tell(self, member: _Member, message: Message) -> None:
        if member.connection:
            send(self._socket, Message(message.kind, message.fields, message.frames, member.connection))

    def _reply(self, request: Message, message: Message) -> None:
        send(self._socket, Message(message.kind, message.fields, message.frames, request.sender))
