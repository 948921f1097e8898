"""What a server does with each kind of message."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from cnnstrategies.paramserver.compression import CHANGES
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    Encoding,
    Header,
    InvalidMessageError,
    Kind,
    fields_of,
    pack_keys,
    unpack_json,
    unpack_keys,
)
from cnnstrategies.paramserver.option_checks import check_options
from cnnstrategies.paramserver.server.asynchronous import Asynchronous
from cnnstrategies.paramserver.server.decision import Decision
from cnnstrategies.paramserver.server.pushes import Begin, Who
from cnnstrategies.paramserver.server.senders import Gaps, Outbox
from cnnstrategies.paramserver.server.shard import Pull, Shard
from cnnstrategies.paramserver.server.synchronous import Synchronous
from cnnstrategies.paramserver.specification import Options, Specification


class Hello(NamedTuple):
    """The contents of a `HELLO`.

    Attributes:
        step: The step that it works on, or whose answers it waits for; None if it is no member.
        joins: Whether it takes part from now on.
        first: The step that it has begun with.
        given: Whether the parameters that it begins with have come.
        request: The step whose values are under way to it; None if none are.
        answered: The slices that it has had the step's answer for.
    """

    step: int | None
    joins: bool
    first: int
    given: bool
    request: int | None
    answered: frozenset[int]

    @classmethod
    def of(cls, header: Header, payload: memoryview) -> "Hello":
        """The one in a message.

        Raises:
            InvalidMessageError: There is none.
        """
        said = fields_of(payload, header)
        return cls(
            None if header.step == NO_STEP else header.step,
            said.flag("joins"),
            said.integer("first"),
            said.flag("given"),
            None if said.fields.get("request") is None else said.integer("request"),
            frozenset(unpack_keys(payload[header.meta :])),
        )


Mode = Synchronous | Asynchronous

# As keys comes no value, only that it is there.
_PULLED = {int(encoding): encoding for encoding in Encoding if encoding != Encoding.KEYS}


class Handlers:
    """Acts on messages whose senders have been checked.

    Args:
        specification: What all processes of the run agree on.
        server: Id of this server.
        shard: Its slices.
        mode: Applies the updates.
        outbox: Sends its messages.
        gaps: Counts the messages of other servers.
        dropped: Counts messages that were of no use, by reason.
        deaf: Tells the servers of which nothing has come for too long.
    """

    def __init__(
        self,
        specification: Specification,
        server: int,
        shard: Shard,
        mode: Mode,
        outbox: Outbox,
        gaps: Gaps,
        dropped: Counter[str],
        deaf: Callable[[], list[int]],
    ) -> None:
        self._dropped = dropped
        self._specification = specification
        self._pipelined = specification.pipelined
        self._server = server
        self._shard = shard
        self._mode = mode
        self._outbox = outbox
        self._gaps = gaps
        self._deaf = deaf
        self._view = -1
        self._text = b""
        self._options: Options = []
        self._handlers: dict[Kind, Callable[[int, Header, memoryview], None]] = {
            Kind.HELLO: self._hello,
            Kind.LEAVE: lambda worker, header, payload: self._mode.leave(worker),
            Kind.VALUE: self._initialise,
            Kind.STATE: self._initialise,
            Kind.BEGIN: self._begin,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.GET_STATE: lambda worker, header, payload: self._shard.send_state(worker, header.step),
            Kind.RELAY_BEGIN: self._relay_begins,
            Kind.RELAY: self._shard.copies.relayed,
            Kind.ACKNOWLEDGE: lambda server, header, payload: self._shard.acknowledged(server, header.key, header.base),
            Kind.COPY: self._copied,
            Kind.COPY_STATE: self._shard.copies.copied_state,
            Kind.PING: self._asked,
        }

    def follow(self, view: View) -> None:
        """Go on with another view."""
        self._view = view.number
        before = self._shard.owned
        self._shard.place(view)
        self._mode.follow(view)
        if self._shard.owned - before:
            for worker in list(self._outbox.routes):
                self._outbox.ask_again(worker)  # What it has sent here before this view was dropped.

    def handle(self, peer: int, header: Header, payload: memoryview) -> None:
        """Act on one message.

        Args:
            peer: Number of the worker or server that has sent it.
            header: Its header.
            payload: What follows.

        Raises:
            InvalidMessageError: Its contents do not fit.
        """
        if header.kind != Kind.PUSH:
            self._mode.settle()
        handler = self._handlers.get(header.kind)
        if handler is not None:
            handler(peer, header, payload)
        elif isinstance(self._mode, Synchronous):
            self._mode.from_server(peer, header, fields_of(payload, header))

    # Of workers

    def _hello(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.base > self._view:
            return  # It knows a newer view, and asks again until this server does too.
        said = Hello.of(header, payload)
        step, request = said.step, said.request
        behind: dict[int, int] = {}
        if step is not None:
            answered, given = said.answered, said.given
            if not given and self._is_missed(step - 1):
                answered = self._shard.owned  # As if it were there: a newcomer cannot push it, and would wait for ever.
            behind = self._behind((worker, header.incarnation), step if given else step - 1, answered, said.first)
            if not isinstance(self._mode, Synchronous):
                self._mode.met((worker, header.incarnation), said.first)
        # Only a question, at first: a newcomer becomes a member when it says from which step on.
        begins = self._mode.join(worker, step) if said.joins else 0
        self._mode.here(worker)
        if begins is None:
            return  # It asks again until this server knows where the others are.
        answer = {
            "ready": self._shard.ready and not behind,
            "lost": self._values_lost,
            "leader": self._leads(),
            "asked": header.sequence,
            "counted": self._mode.clock.counts(worker),
            "deaf": self._deaf(),
            "held": request is not None,
        }
        held = [] if request is None else self._held((worker, header.incarnation), request)
        self._outbox.to_worker(worker, Kind.WELCOME, pack_keys(held), step=begins, json=answer, encoding=Encoding.KEYS)

    def _held(self, who: Who, request: int) -> list[int]:
        """The slices that a worker will get without asking again: its pull and the push before it are here."""
        return [key for key in self._shard.own if self._mode.holds(key, who, request)]

    @property
    def _values_lost(self) -> bool:
        """Whether all who had values of own slices have died: steps are known to be made."""
        return self._mode.begun and not self._shard.ready

    def _leads(self) -> bool:
        return not isinstance(self._mode, Synchronous) or self._mode.leader == self._server

    def _is_missed(self, step: int) -> bool:
        """Whether a decided step cannot be made here any more: it is lost for ever."""
        return isinstance(self._mode, Synchronous) and self._mode.is_missed(step)

    def _behind(self, who: Who, step: int, answered: frozenset[int], first: int) -> dict[int, int]:
        """The own slices that lack updates that a worker knows of, and how many.

        Args:
            who: The worker.
            step: The step that it works on, or whose answers it waits for. A newcomer waits for those of the step
                before its first: that one is decided, and maybe not applied yet.
            answered: Slices that it has had that step's answer for: it pushes and pulls them no more.
            first: The step that it has begun with.
        """
        store, missing = self._shard.store, {}
        for key in self._shard.own:
            last = step if key in answered else step - 1
            if isinstance(self._mode, Synchronous):
                missing[key] = last + 1 - max(0, store.versions[key])
            else:
                missing[key] = last - max(store.seen[key].get(who, -1), first - 1)
        return {key: count for key, count in missing.items() if count > 0}

    def _initialise(self, worker: int, header: Header, payload: memoryview) -> None:
        if self._values_lost and header.key in self._shard.owned:
            raise InvalidMessageError("a first value although steps were made")  # With it the run would begin anew.
        before = self._shard.ready
        self._shard.initialise(header, unpack_json(payload, header) if header.meta else {}, payload)
        if self._shard.ready and not before:
            for known in list(self._outbox.routes):
                self._outbox.ask_again(known)  # What came too early was dropped.

    def _begin(self, worker: int, header: Header, payload: memoryview) -> None:
        begin = Begin(self._options_in(header, payload), header.weight, self._pulled(header.base), header.rung)
        self._mode.begin((worker, header.incarnation), header.step, begin)

    def _pulled(self, number: int) -> Encoding:
        """The encoding in which a worker pulls."""
        encoding, changes = _PULLED.get(number), self._shard.store.changes
        if encoding is None or (encoding in CHANGES and (changes is None or encoding != changes.encoding)):
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
        if header.key not in self._shard.owned:
            raise InvalidMessageError("a push of a slice that another server is the primary of")
        if not self._mode.push((worker, header.incarnation), header, payload):
            self._dropped["a push that is here already"] += 1
        if self._pipelined:  # It asks for its answer, too.
            self._shard.pull_one(worker, header.key, Pull(header.step + 1, header.step + 1))

    def _pull(self, worker: int, header: Header, payload: memoryview) -> None:
        if header.encoding != Encoding.KEYS or len(payload) % 4:
            raise InvalidMessageError("a pull without keys")
        keys = unpack_keys(payload)
        if len(set(keys)) != len(keys) or not self._shard.owned.issuperset(keys):
            raise InvalidMessageError("a pull of slices that another server is the primary of")
        encoding = self._pulled(header.base >> 1)
        if header.base & 1:
            # A newcomer to common steps begins with what the others have.
            version = header.step if isinstance(self._mode, Synchronous) else 0
            self._shard.pull(worker, keys, Pull(header.step, version, whole=True, question=header.question))
        elif isinstance(self._mode, Synchronous):
            self._shard.pull(worker, keys, Pull(header.step, header.step, encoding=encoding, mark=header.weight))
        else:
            self._mode.pull((worker, header.incarnation), keys, header.step, encoding)

    # Of other servers

    def _relay_begins(self, server: int, header: Header, payload: memoryview) -> None:
        if not isinstance(self._mode, Synchronous):
            self._shard.copies.relay_begins(server, self._options_in(header, payload))
            return
        decision = Decision.of(fields_of(payload, header), self._specification)
        self._shard.copies.relay_begins(server, decision.options)
        self._mode.adopt(decision)

    def _copied(self, server: int, header: Header, payload: memoryview) -> None:
        said = fields_of(payload, header)
        decided = said.part("decided")
        decision = None if decided is None else Decision.of(decided, self._specification)
        self._shard.copies.copied(server, header, said, payload[header.meta :])
        if isinstance(self._mode, Synchronous) and decision is not None:
            self._mode.adopt(decision)

    def _asked(self, server: int, header: Header, payload: memoryview) -> None:
        if self._gaps.asked(server, header.base):
            self._shard.copies.tell_again(server)
            if isinstance(self._mode, Synchronous):
                self._mode.tell_again(server)
