"""A worker's part of the protocol: it sends gradients and takes parameters, also if messages are lost on the way."""

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

PROBE_SECONDS = 1.0  # without an answer before a server is asked whether it is alive
REPEAT_SECONDS = 0.05
STOPPED_SECONDS = 1.0  # A longer time between two calls of `on_time` shows that this process was stopped.


class Wait(NamedTuple):
    """A wait of a procedure.

    Attributes:
        waiting: Whether the procedure still has to wait.
        repeat: Called at once and then several times a second while the procedure waits.
    """

    waiting: Callable[[], bool]
    repeat: Callable[[], object] | None = None


class WorkerRole:
    """One worker of a run, without sockets, threads and clocks.

    An action that takes several messages is a procedure: a generator that yields each :class:`Wait` and continues when
    the wait is over. During a wait, the driver hands over messages and views, calls :meth:`on_time`, and sends the
    messages that :attr:`connections` hold.

    Args:
        specification: The run's specification.
        slices: All slices.
        parameters: The parameters, into which pulled values are written.
        id: Id of this worker.
        incarnation: Incarnation of this worker.
        arrived: Called with the index of each parameter whose new values have arrived.

    Attributes:
        step: Number of the step that is or will be worked on next.
        counters: Bytes, steps and times of this worker.
        first_level: Level of the ladder that the first worker used in the last step; None if it is not known.
        connections: Connections to the servers.
        pulls: Pulls of this worker.
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
        self._first_step = 0  # step with which this worker began to take part
        self._pushed_step: int | None = None  # while the worker joins: the step whose gradients it already has
        self._has_values = False  # The parameters with which this worker begins have arrived.
        self._replaces = incarnation > 0
        self._unready: dict[int, float] = {}  # servers without values, with the time since when
        self._welcomes: dict[int, dict[str, Any]] = {}  # servers' answers to the last HELLO
        self._first_values: tuple[Sequence[Tensor], dict[int, SliceState]] | None = None
        self._moved = False  # The parameters are no longer those of the run's start.
        self._version: int | None = None  # of the first slice's values
        self._last_request = 0  # number of the last message that requests an answer

    @property
    def view(self) -> View:
        """The view that this worker follows."""
        return self.connections.view

    # Procedures

    def initialise(self, optimizer_state: Mapping[str, Any] | None) -> None:
        """Keep the first values ready: one of the workers that have them sends them to servers without values.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()``, if the optimizer has a state.
        """
        if self._began_with:  # This worker's own steps change the parameters before the servers have their values.
            for value, parameter in zip(self._began_with, self._parameters, strict=True):
                value.copy_(parameter.detach())
        states: dict[int, SliceState] = {}
        if optimizer_state is not None:
            states = cut_state(self._specification, self._slices, optimizer_state)
        self._first_values = self._began_with or self._parameters, states

    def join(self, now: float, has: int | None = None) -> Generator[Wait, None, int]:
        """Become a member at a step boundary, and take the parameters.

        Args:
            now: The time, in seconds.
            has: A step whose gradients this worker already has. The worker may begin with that step if the workers
                that began it have not finished it.

        Returns:
            The step to begin with.
        """
        self._pushed_step = has
        yield from self.meet(now)
        steps = yield from self._ask_where_to_begin()
        # Never go back without common steps: servers take a push with an older number for a repeated push.
        self.step = max(steps) if self._specification.aggregates else max(self.step, *steps)
        self._moved = self._moved or self.step > 0
        self._joined, self._first_step, self._has_values, self._pushed_step = True, self.step, False, None
        self._request(refresh=True)
        for server in self._servers:
            self.hello(server)
        yield self.all_here()
        self._has_values = True
        return self.step

    def leave(self) -> Generator[Wait]:
        """Wait for the pulls that are under way, then leave: the other workers no longer wait for this one."""
        yield self.all_here()
        self._joined = False
        yield from self._ask(self._servers, joins=False, leaves=True)

    def refresh(self) -> Generator[Wait]:
        """Take the servers' present values."""
        yield self.all_here()
        self._request(refresh=True)
        yield self.all_here()

    def optimizer_state(self) -> Generator[Wait, None, dict[str, Any]]:
        """Return the servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters."""
        yield self.all_here()
        self._request(refresh=True, states=True)
        yield self.all_here()
        assert self.pulls.states is not None
        return join_state(self._specification, self._slices, self.pulls.states, self._outgoing.options)

    def all_here(self) -> Wait:
        """Return a wait that is over when all parameters are up to date."""
        return Wait(lambda: bool(self.pulls.pending))

    def here(self, index: int) -> Wait:
        """Return a wait that is over when a parameter, which is needed next, is up to date."""
        self.pulls.use(index)
        return Wait(lambda: self.pulls.waits_for(index))

    # Steps

    @property
    def is_first(self) -> bool:
        """Whether this worker chooses encodings: for itself, or, if the workers step together, for all live workers."""
        return not self._specification.aggregates or all(self._id <= worker.id for worker in self.view.workers)

    def encode_as(self, compression: PushCompression, pull_compression: PullCompression, level: int) -> None:
        """Push and pull with these compressions from the next step on; all parameters must be up to date."""
        self.pulls.encoding = payload_compression(pull_compression).encoding
        self._outgoing.encode_as(compression, self.pulls.encoding, level + 1)

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start a step's pushes; all parameters must be up to date.

        The driver hands over messages again only after :meth:`end_step`.
        """
        if self._pipelined:
            self.pulls.begin(self.step + 1)
        self._outgoing.begin(self.step, groups, samples)
        self.counters.samples += samples

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient; in mode ``local`` the change that this worker's own steps have made."""
        self._outgoing.push(index, gradient)

    def end_step(self) -> None:
        """Finish a step's pushes, and request the new parameters."""
        self._outgoing.finish()
        self.step += 1
        self.counters.steps += 1
        self.pulls.reorder()
        if self._pipelined:
            self._last_request = self.connections.sequence
            return
        self._request(refresh=False)

    # Events

    def begin_waiting(self, now: float, wait: Wait) -> None:
        """Begin a wait: from now on the silence of servers counts."""
        self._now = self._next_repeat = now
        self._repeat = wait.repeat
        self.connections.begin_waiting(now)

    def on_time(self, now: float) -> None:
        """Repeat requests, and check for silent servers; called several times a second, after new views.

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
        """Follow a view if it is newer than the present one.

        Raises:
            RemovedError: This worker is not in the view.
        """
        if self.connections.follow(now, view):
            self._place()

    def on_message(self, server: int, header: Header, payload: memoryview) -> None:
        """Act on a message.

        Raises:
            ServersUnreachableError: The message shows that the run cannot go on.
        """
        if header.kind == Kind.PULLED:
            self._pulled(header, payload)
        elif header.kind == Kind.WELCOME:
            self._welcomed(server, header, payload)

    def _pulled(self, header: Header, payload: memoryview) -> None:
        if not self.pulls.take(header, payload) or self.pulls.states is not None:
            return
        refreshing = self.pulls.refreshing
        if not refreshing or header.base > 0:  # Other workers may have made steps before this worker joined.
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
        server_keys = self.connections.of(server)
        if values.get("again") is True:
            self._send_again(server_keys)
            return
        answered_request = int(values["asked"])
        self._welcomes[server] = {**values, "step": header.step}
        self.connections.check_deaf(self._now, server, values["deaf"])
        # The server has answered all messages before the HELLO. A push or pull that is still open was lost, or the
        # server holds it back.
        if values["held"] and answered_request > self._last_request:
            unsettled = (self._outgoing.unanswered.keys() | self.pulls.pending.keys()).intersection(server_keys)
            held = set(unpack_keys(payload[header.meta :]))
            if unsettled - held:
                self._send_again([key for key in server_keys if key not in held])
            elif not unsettled:
                # A server from which this worker needs nothing also votes, and must learn that the step has begun.
                self._outgoing.begin_again((server,), self.step)
        if values["ready"] is not False:
            self._unready.pop(server, None)
        elif self._moved or values["lost"] or self._waits_in_vain(server):
            self.connections.lost(server)
        else:  # The server was started again before it had made a step, or no worker has sent it values yet.
            self._send_first_values(server)

    def _send_first_values(self, server: int) -> None:
        """Send a server the first values of its slices, if this worker is the one to do so.

        The server ignores values that it already has.
        """
        # Workers that replace another one come last: most of them do not have first values.
        sender = min(((worker.incarnation > 0, worker.id) for worker in self.view.workers), default=None)
        if self._first_values is not None and sender == (self._replaces, self._id):
            values, states = self._first_values
            for key in self.connections.of(server):
                pieces = [
                    values[part.parameter].detach().cpu().reshape(-1)[part.start : part.stop]
                    for part in self._slices[key].parts
                ]
                # The payload is a copy: pulls write into the same memory, perhaps before the message has left.
                payload = pack_state(states.get(key, [])) + bytes(as_bytes(torch.cat(pieces)))
                self.connections.send(server, Kind.VALUE, payload, key=key, encoding=Encoding.DENSE)

    def _waits_in_vain(self, server: int) -> bool:
        """Return whether a worker that replaces another one has waited too long for a server's first values.

        All workers that had first values are gone then.
        """
        since = self._unready.setdefault(server, self._now)
        return self._replaces and self._first_values is None and self._now - since > self._specification.timeout

    # Requests

    def meet(self, now: float) -> Generator[Wait]:
        """Wait until the run's servers are members and know this worker."""
        self.connections.begin_meeting(now)
        yield Wait(lambda: not self.connections.met(self._now))
        self._place()
        yield from self._ask(self._servers, joins=False)

    @property
    def _servers(self) -> set[int]:
        """Ids of the live servers."""
        return {server.id for server in self.view.servers}

    def _ask_where_to_begin(self) -> Generator[Wait, None, list[int]]:
        """Ask the servers that count steps for the step with which this worker begins; return their answers."""
        aggregates = self._specification.aggregates
        while True:
            # Common steps are counted by the leader alone. It may die before it answers, and a server that reported
            # itself as leader may have been replaced by then, or may have lost the lead to an older one.
            leaders = {server for server, welcome in self._welcomes.items() if welcome["leader"] is True}
            answers = yield from self._ask(leaders if aggregates else self._servers, joins=True)
            if answers and (not aggregates or all(answer["leader"] is True for answer in answers.values())):
                return [welcome["step"] for welcome in answers.values()]
            yield from self.meet(self._now)

    def _ask(
        self, servers: set[int], joins: bool, leaves: bool = False
    ) -> Generator[Wait, None, dict[int, dict[str, Any]]]:
        """Send HELLO to some servers until all live ones among them have answered; return the answers by server."""
        requests: set[int] = set()
        self._welcomes = {}

        def ask() -> None:
            for server in servers & self._servers:
                self._send_hello(server, NO_STEP, joins, leaves=leaves)
                requests.add(self.connections.sequence)

        def answers() -> dict[int, dict[str, Any]]:
            # Other welcomes answer an earlier HELLO or a probe, and do not contain the step to begin with.
            return {
                server: welcome
                for server, welcome in self._welcomes.items()
                if server in servers and welcome["asked"] in requests
            }

        yield Wait(lambda: bool(servers & self._servers - answers().keys()), ask)
        return answers()

    def _send_hello(
        self, server: int, step: int, joins: bool, answered: Sequence[int] = (), leaves: bool = False
    ) -> None:  # fmt: skip
        fields: dict[str, Any] = {
            "joins": joins,
            "leaves": leaves,
            "first": self._first_step,
            "given": self._has_values,
            "request": self.pulls.step if self.pulls.pending else None,
            "has": self._pushed_step,
        }
        self.connections.send(
            server, Kind.HELLO, pack_keys(answered), json=fields, step=step, base=self.view.number,
            encoding=Encoding.KEYS,
        )  # fmt: skip

    def hello(self, server: int) -> None:
        """Tell a server this worker's step: the one whose pushes are not all answered, otherwise the next one."""
        if not self._joined:
            self._send_hello(server, NO_STEP, False)
            return
        step, server_keys, answered = self.step, self.connections.of(server), list[int]()
        if not self._has_values:
            answered = [key for key in server_keys if key not in self.pulls.pending]
        elif self._outgoing.unanswered and self.pulls.pending and not self.pulls.refreshing:
            step -= 1
            answered = [key for key in server_keys if key not in self._outgoing.unanswered]
        self._send_hello(server, step, True, answered)

    # Sending again

    def _place(self) -> None:
        """Find each slice's primary in the present view; send a new primary what the old one has not answered."""
        moved = self.connections.place()
        if self._joined:
            for server in self._servers:
                self.hello(server)
        self._send_again(moved)

    def _request(self, refresh: bool, states: bool = False) -> None:
        """Request all parameters, or their optimizer's states."""
        self.pulls.request(self.step, refresh, states)
        self._last_request = self.connections.sequence

    def _send_again(self, keys: list[int]) -> None:
        self._outgoing.send_again(keys, self.step)
        if not self._pipelined or self.pulls.refreshing:  # Otherwise the pushes also request their answers.
            self.pulls.send_again(keys)
        self._last_request = self.connections.sequence
