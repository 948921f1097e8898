"""A server: holds slices of the parameters, applies the optimizer to them, and answers pulls."""

from collections import Counter
from collections.abc import Mapping

from cnnstrategies.paramserver.core.node import ControlError, End
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import SERVER, Effects, Header, InvalidMessageError, Kind, Say
from cnnstrategies.paramserver.server.asynchronous import Asynchronous
from cnnstrategies.paramserver.server.handlers import Handlers, Mode
from cnnstrategies.paramserver.server.senders import PING_SECONDS, Gaps, Outbox, Senders
from cnnstrategies.paramserver.server.shard import Shard
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.server.synchronous import Synchronous
from cnnstrategies.paramserver.specification import Specification

STOPPED_SECONDS = 1.0  # between two looks: then this process was stopped


class Server:
    """One server of a run, without sockets, threads, clocks and files: all methods return what is to be done.

    Its driver calls :meth:`follow` before it hands over messages, for those of members of a newer view are dropped;
    :meth:`on_time` several times a second; :meth:`flush` when it has read what was waiting; and :meth:`work` as long as
    :attr:`busy`.

    Attributes:
        id: This server's place.
        view: The view that it follows.
        mode: Applies the updates.
        shard: What the server knows of its slices, the pushes and the workers.
        store: The values.
        handlers: Act on messages.
        dropped: How many messages were dropped, by reason.
    """

    def __init__(
        self,
        specification: Specification,
        id: int,
        store: Store,
        encrypted: bool = False,
    ) -> None:
        self.id = id
        self.view = View(-1, (), ())
        self.store = store
        self.dropped: Counter[str] = Counter()
        self._outbox = Outbox(id, specification.session)
        shard = self.shard = Shard(specification, id, self._outbox, store)
        self.mode: Mode = (
            Synchronous(specification, shard, id, self._outbox)
            if specification.aggregates
            else Asynchronous(specification, shard)
        )
        self._gaps = Gaps()
        self._senders = Senders(encrypted, self._gaps)
        self.handlers = Handlers(
            specification, id, shard, self.mode, self._outbox, self._gaps, self.dropped, self._deaf
        )
        self._sign_seconds = min(1.0, specification.timeout / 4)
        self._deaf_after = specification.deaf_after
        self._stopped_seconds = min(STOPPED_SECONDS, specification.timeout / 2)
        self._now = 0.0
        self._pinged = self._gave_sign = 0.0
        self._heard: dict[int, float] = {}  # when each other server was
        self._heard_workers: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self.mode.busy()

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
        self.mode.settle()
        if self.id in {server.id for server in self.view.servers} - {server.id for server in view.servers}:
            reason = (
                f"server {self.id} is no longer in the view (number {view.number}): it was taken for dead and another "
                "takes its place"
            )
            return [End(reason, False)]
        before, self.view = {server.id: server.since for server in self.view.servers}, view
        since = {server.id: server.since for server in view.servers}
        if self.id not in before and self.id in since and self.shard.store.changes is not None:
            self.shard.store.changes.begin_with(since[self.id])
        self._senders.follow(view)
        self._outbox.follow(view)
        self.handlers.follow(view)
        self._heard = {
            server.id: self._heard.get(server.id, now) if before.get(server.id) == server.since else now
            for server in view.servers
            if server.id != self.id
        }
        return self._outbox.take()

    def on_message(self, now: float, route: bytes, user: str, header: Header, payload: memoryview) -> Effects:
        """Act on a message.

        Args:
            now: The time.
            route: Where it came from.
            user: The sender's key, where messages are encrypted.
            header: The message's, not checked against the view yet.
            payload: What follows.
        """
        self._goes_on(now)
        try:
            self._handle(route, user, header, payload)
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
        self.mode.settle()
        if now - self._gave_sign > self._sign_seconds:
            self._gave_sign = now
            self._outbox.sign(self._heard_workers)
            self._heard_workers.clear()
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            self._gaps.pinged()
            for server in self.view.servers:
                if server.id != self.id:
                    self._outbox.to_server(server.id, Kind.PING, base=self._gaps.found.get(server.id, 0))
        if self.mode.roll.expire(now):
            self.mode.proceed()
        return self._outbox.take()

    def flush(self) -> Effects:
        """All that was waiting has been read."""
        self.mode.flush()
        return self._outbox.take()

    def work(self) -> Effects:
        """Do one of the things that are left to be done."""
        self.mode.work()
        return self._outbox.take()

    def drop(self, reason: str) -> None:
        """Count a message that was of no use."""
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            text = f"server {self.id} dropped a message: {reason}; further ones are only counted"
            self._outbox.effects.append(Say(text, False))

    def _handle(self, route: bytes, user: str, header: Header, payload: memoryview) -> None:
        peer = header.sender & ~SERVER
        if header.sender >= SERVER and self._senders.are_joined(header, user):
            self._heard[peer] = self._now  # Also while it follows a view that this server has not heard of yet.
        missed = self._senders.check(header, user)
        if header.sender >= SERVER:
            if missed:
                self.shard.copies.relays_lost(peer)
                self._outbox.to_server(peer, Kind.PING, base=self._gaps.found[peer])
        else:
            self._heard_workers.add(peer)
            before = self._outbox.routes.get(peer, route)
            self._outbox.routes[peer] = route
            if before != route:
                # Answers on the old connection may be lost: have the worker send again what is not answered.
                self._outbox.ask_again(peer)
        self.handlers.handle(peer, header, payload)

    def _goes_on(self, now: float) -> None:
        """Note the time. It is looked at several times a second, unless this process is stopped."""
        passed = now - self._now
        self._now = now
        if passed > self._stopped_seconds:  # Then the others were not silent.
            self._heard = {server: min(heard + passed, now) for server, heard in self._heard.items()}
            self.mode.roll.stopped(passed)

    def _deaf(self) -> list[int]:
        """The servers of the view of which nothing has come for too long: a dead one is out of the view by then."""
        limit = self._now - self._deaf_after
        return [server for server, heard in self._heard.items() if heard < limit]
