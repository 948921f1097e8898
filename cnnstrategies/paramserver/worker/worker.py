"""A worker's part: gives gradients to the servers and takes the parameters, whatever messages are lost on the way."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes, payload_compression
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import (
    NO_STEP,
    Encoding,
    Header,
    Kind,
    pack_keys,
    unpack_json,
    unpack_keys,
)
from cnnstrategies.paramserver.optimizer_state import SliceState, cut_state, join_state, pack_state
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import PullCompression, PushCompression, Specification
from cnnstrategies.paramserver.worker.connections import Connections, Counters
from cnnstrategies.paramserver.worker.outgoing import Outgoing
from cnnstrategies.paramserver.worker.pulls import Pulls

PROBE_SECONDS = 1.0  # without an answer before a server is asked whether it is there
REPEAT_SECONDS = 0.05
STOPPED_SECONDS = 1.0  # between two looks at the time: then this process was stopped


class Wait(NamedTuple):
    """A procedure waits as long as `waiting`; `repeat` is called at once, and again several times a second."""

    waiting: Callable[[], bool]
    repeat: Callable[[], object] | None = None


class WorkerRole:
    """One worker of a run, without sockets, threads and clocks.

    What takes more than one message is a procedure: a generator that yields what it waits for, and goes on when that
    is over. While it waits, its driver hands over messages and views, calls :meth:`on_time`, and sends what
    :attr:`connections` give.

    `arrived` is called with the index of each parameter that has come. `first_rung` is the place in the ladder that the
    first of the workers has used in the last step, if they have it in common.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        parameters: Sequence[Tensor],
        id: int,
        incarnation: int,
        arrived: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.step = 0
        self.counters = Counters()
        self.first_level: int | None = None
        self._specification = specification
        self._parameters = parameters
        self._slices = slices
        self._id = id
        self._arrived = arrived
        self.connections = Connections(specification, slices, id, incarnation)
        local = specification.mode == "local"
        self._began_with = [torch.zeros(p.shape, dtype=p.dtype) for p in parameters] if local else []
        self.pulls = Pulls(slices, parameters, self.connections, self._began_with, specification.pulls_changes)
        self._pipelined = specification.pipelined
        answers = self.pulls if self._pipelined else None
        self._outgoing = Outgoing(specification, slices, self.connections, self.counters, self._began_with, answers)
        self._now = 0.0
        self._repeat: Callable[[], object] | None = None
        self._next_repeat = 0.0
        self._probe_seconds = min(PROBE_SECONDS, specification.timeout / 8)
        self._stopped_seconds = min(STOPPED_SECONDS, specification.timeout / 4)
        self._joined = False
        self._first = 0  # step
        self._has: int | None = None  # while it joins, the step of which it has gradients
        self._given = False  # The parameters that it begins with have come.
        self._replaces = incarnation > 0
        self._unready: dict[int, float] = {}  # servers without values, and since when
        self._welcomes: dict[int, dict[str, Any]] = {}  # what servers have answered to the last hello
        self._first_values: tuple[Sequence[Tensor], dict[int, SliceState]] | None = None
        self._moved = False  # The parameters are no longer those of the run's start.
        self._version: int | None = None  # of the first slice's values
        self._asked = 0  # Number of the last message that asks for what is under way.

    @property
    def view(self) -> View:
        """The view that it follows."""
        return self.connections.view

    # Procedures

    def initialise(self, optimizer_state: Mapping[str, Any] | None) -> None:
        """Have the first values ready: one of those who have gives them to servers without any."""
        if self._began_with:  # Its own steps move the parameters before others know of them.
            for value, parameter in zip(self._began_with, self._parameters, strict=True):
                value.copy_(parameter.detach())
        states: dict[int, SliceState] = {}
        if optimizer_state is not None:
            states = cut_state(self._specification, self._slices, optimizer_state)
        self._first_values = self._began_with or self._parameters, states

    def join(self, now: float, has: int | None = None) -> Generator[Wait, None, int]:
        """Become a member at a step boundary, and take the parameters; the step to begin with.

        It may be one that this worker `has` the gradients of, and those who began it have not finished.
        """
        self._has = has
        yield from self.meet(now)
        steps = yield from self._ask_where_to_begin()
        # Never back where servers take a push with the number of an older one for the same push again.
        self.step = max(steps) if self._specification.aggregates else max(self.step, *steps)
        self._moved = self._moved or self.step > 0
        self._joined, self._first, self._given, self._has = True, self.step, False, None
        self._request(refresh=True)
        for server in self._servers:
            self.hello(server)
        yield self.all_here()
        self._given = True
        return self.step

    def leave(self) -> Generator[Wait]:
        """Wait for the pulls that are under way, and no longer be waited for."""
        yield self.all_here()
        self._joined = False
        yield from self._ask(self._servers, joins=False, leaves=True)

    def refresh(self) -> Generator[Wait]:
        """Take the servers' present values."""
        yield self.all_here()
        self._request(refresh=True)
        yield self.all_here()

    def optimizer_state(self) -> Generator[Wait, None, dict[str, Any]]:
        """The servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters."""
        yield self.all_here()
        self._request(refresh=True, states=True)
        yield self.all_here()
        assert self.pulls.states is not None
        return join_state(self._specification, self._slices, self.pulls.states, self._outgoing.options)

    def all_here(self) -> Wait:
        """All parameters are up to date."""
        return Wait(lambda: bool(self.pulls.pending))

    def here(self, index: int) -> Wait:
        """A parameter, which is the next that is needed, is up to date."""
        self.pulls.use(index)
        return Wait(lambda: self.pulls.waits_for(index))

    # Steps

    @property
    def is_first(self) -> bool:
        """Whether this worker chooses encodings: for itself, or where steps are common for all that live."""
        return not self._specification.aggregates or all(self._id <= one.id for one in self.view.workers)

    def encode_as(self, compression: PushCompression, pull_compression: PullCompression, level: int) -> None:
        """From the next step on push and pull in these encodings; all parameters are up to date."""
        self.pulls.encoding = payload_compression(pull_compression).encoding
        self._outgoing.encode_as(compression, self.pulls.encoding, level + 1)

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start a step's pushes; all parameters are up to date. Nothing is handed over before the step ends."""
        if self._pipelined:
            self.pulls.begin(self.step + 1)
        self._outgoing.begin(self.step, groups, samples)
        self.counters.samples += samples

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, or in mode ``local`` how far its own steps have taken it."""
        self._outgoing.push(index, gradient)

    def end_step(self) -> None:
        """Finish a step's pushes, and ask for the new parameters."""
        self._outgoing.finish()
        self.step += 1
        self.counters.steps += 1
        self.pulls.reorder()
        if self._pipelined:
            self._asked = self.connections.sequence
            return
        self._request(refresh=False)

    # What happens

    def begin_waiting(self, now: float, wait: Wait) -> None:
        """From now on silence counts."""
        self._now = self._next_repeat = now
        self._repeat = wait.repeat
        self.connections.begin_waiting(now)

    def on_time(self, now: float) -> None:
        """Ask again, and look who is silent; to be called several times a second, after views were handed over.

        Raises:
            ServersUnreachableError: A server was silent for too long.
        """
        if now - self._now > self._stopped_seconds:
            self.connections.stopped(now, now - self._now)
        self._now = now
        if self._repeat is not None and now >= self._next_repeat:
            self._repeat()
            self._next_repeat = now + REPEAT_SECONDS
        for server in self.connections.unanswering(now, self._probe_seconds):
            self.hello(server)
        self.connections.check(now, self._joined)

    def follow(self, now: float, view: View) -> None:
        """Go on with a view, if it is newer.

        Raises:
            RemovedError: This worker is not in it.
        """
        if self.connections.follow(now, view):
            self._place()

    def on_message(self, server: int, header: Header, payload: memoryview) -> None:
        """Act on a message.

        Raises:
            ServersUnreachableError: It says that the run cannot go on.
        """
        if header.kind == Kind.PULLED:
            self._pulled(header, payload)
        elif header.kind == Kind.WELCOME:
            self._welcomed(server, header, payload)

    def _pulled(self, header: Header, payload: memoryview) -> None:
        if not self.pulls.take(header, payload) or self.pulls.states is not None:
            return
        refreshing = self.pulls.refreshing
        if not refreshing or header.base > 0:  # Others may have made steps before this one came.
            self._moved, self._first_values = True, None
        self.counters.bytes_received += len(payload)
        if header.key == 0:
            if self._version is not None and not refreshing:
                self.counters.staleness += max(0, header.base - self._version - 1)
            self._version = header.base
            self.first_level = header.level - 1 if header.level else None
        self._outgoing.unanswered.pop(header.key, None)
        for part in self._slices[header.key].parts:
            if not self.pulls.waits_for(part.parameter):
                self._arrived(part.parameter)

    def _welcomed(self, server: int, header: Header, payload: memoryview) -> None:
        values = unpack_json(payload, header)
        own = self.connections.of(server)
        if values.get("again") is True:
            self._send_again(own)
            return
        asked = int(values["asked"])
        self._welcomes[server] = {**values, "step": header.step}
        self.connections.check_deaf(self._now, server, values["deaf"])
        # It has answered what came before the question: what is still open then has been lost, or it holds it.
        if values["held"] and asked > self._asked:
            unsettled = (self._outgoing.unanswered.keys() | self.pulls.pending.keys()).intersection(own)
            held = set(unpack_keys(payload[header.meta :]))
            if unsettled - held:
                self._send_again([key for key in own if key not in held])
            elif not unsettled:
                # One of which nothing is open votes too, and must hear that the step has begun.
                self._outgoing.begin_again((server,), self.step)
        if values["ready"] is not False:
            self._unready.pop(server, None)
        elif self._moved or values["lost"] or self._waits_in_vain(server):
            self.connections.lost(server)
        else:  # It was started again before it had made a step, or nobody has given it some.
            self._send_first_values(server)

    def _send_first_values(self, server: int) -> None:
        """Send a server the first values of its own slices, unless another worker does; what it has, it ignores."""
        # One that takes another's place mostly has none.
        gives = min(((one.incarnation > 0, one.id) for one in self.view.workers), default=None)
        if self._first_values is not None and gives == (self._replaces, self._id):
            values, states = self._first_values
            for key in self.connections.of(server):
                parts = self._slices[key].parts
                own = [values[part.parameter].detach().cpu().reshape(-1)[part.start : part.stop] for part in parts]
                # A copy: the values are pulled into the same memory, maybe before they have left.
                payload = pack_state(states.get(key, [])) + bytes(as_bytes(torch.cat(own)))
                self.connections.send(server, Kind.VALUE, payload, key=key, encoding=Encoding.DENSE)

    def _waits_in_vain(self, server: int) -> bool:
        """Whether a worker that takes another's place has waited for values for long: those who had some are gone."""
        since = self._unready.setdefault(server, self._now)
        return self._replaces and self._first_values is None and self._now - since > self._specification.timeout

    # Questions

    def meet(self, now: float) -> Generator[Wait]:
        """Wait until the run's servers are there and know this worker."""
        self.connections.begin_meeting(now)
        yield Wait(lambda: not self.connections.met(self._now))
        self._place()
        yield from self._ask(self._servers, joins=False)

    @property
    def _servers(self) -> set[int]:
        """Those that live."""
        return {server.id for server in self.view.servers}

    def _ask_where_to_begin(self) -> Generator[Wait, None, list[int]]:
        """Ask those who count steps from which one on this worker takes part."""
        aggregates = self._specification.aggregates
        while True:
            # In common steps one server counts. One that dies before it has answered is no longer there to be asked,
            # and one that has said before that it leads may be another by now, or an older one be back.
            leaders = {one for one, welcome in self._welcomes.items() if welcome["leader"] is True}
            answers = yield from self._ask(leaders if aggregates else self._servers, joins=True)
            if answers and (not aggregates or all(one["leader"] is True for one in answers.values())):
                return [welcome["step"] for welcome in answers.values()]
            yield from self.meet(self._now)

    def _ask(
        self, servers: set[int], joins: bool, leaves: bool = False
    ) -> Generator[Wait, None, dict[int, dict[str, Any]]]:
        """Say hello, or goodbye, until those of some servers that live have answered; their answers."""
        asked: set[int] = set()
        self._welcomes = {}

        def ask() -> None:
            for server in servers & self._servers:
                self._say_hello(server, NO_STEP, joins, leaves=leaves)
                asked.add(self.connections.sequence)

        def answers() -> dict[int, dict[str, Any]]:
            # Others answer what was asked before, or who is there: they do not say from which step on this one counts.
            return {one: told for one, told in self._welcomes.items() if one in servers and told["asked"] in asked}

        yield Wait(lambda: bool(servers & self._servers - answers().keys()), ask)
        return answers()

    def _say_hello(
        self, server: int, step: int, joins: bool, answered: Sequence[int] = (), leaves: bool = False
    ) -> None:  # fmt: skip
        request = self.pulls.step if self.pulls.pending else None
        said: dict[str, Any] = {"joins": joins, "leaves": leaves, "first": self._first, "given": self._given}
        said |= {"request": request, "has": self._has}
        self.connections.send(
            server, Kind.HELLO, pack_keys(answered), json=said, step=step, base=self.view.number, encoding=Encoding.KEYS
        )

    def hello(self, server: int) -> None:
        """Say where this worker is: at the step whose pushes are not all answered, else at the next."""
        if not self._joined:
            self._say_hello(server, NO_STEP, False)
            return
        step, own, answered = self.step, self.connections.of(server), list[int]()
        if not self._given:
            answered = [key for key in own if key not in self.pulls.pending]
        elif self._outgoing.unanswered and self.pulls.pending and not self.pulls.refreshing:
            step -= 1
            answered = [key for key in own if key not in self._outgoing.unanswered]
        self._say_hello(server, step, True, answered)

    # Sending again

    def _place(self) -> None:
        """Find each slice's primary in the present view; send it what the last one has not answered."""
        moved = self.connections.place()
        if self._joined:
            for server in self._servers:
                self.hello(server)
        self._send_again(moved)

    def _request(self, refresh: bool, states: bool = False) -> None:
        """Ask for all parameters, or their optimizer's states."""
        self.pulls.request(self.step, refresh, states)
        self._asked = self.connections.sequence

    def _send_again(self, keys: list[int]) -> None:
        self._outgoing.send_again(keys, self.step)
        if not self._pipelined or self.pulls.refreshing:  # Else the pushes ask, too.
            self.pulls.send_again(keys)
        self._asked = self.connections.sequence
