"""The worker's side of the protocol: pushes of gradients, pulls of parameters, and repetition of lost messages."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import payload_compression
from cnnstrategies.paramserver.core.view import View
from cnnstrategies.paramserver.messages import NO_STEP, Header, Kind, unpack_json, unpack_keys
from cnnstrategies.paramserver.optimizer_state import join_state
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import PullCompression, PushCompression, Specification
from cnnstrategies.paramserver.worker.connections import REPEAT_SECONDS, Connections, Wait
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.paramserver.worker.outgoing import Outgoing
from cnnstrategies.paramserver.worker.pulls import Pulls
from cnnstrategies.paramserver.worker.registration import (
    TAKES_PART,
    InitialValues,
    Registration,
    WorkerEvent,
    WorkerState,
)


class WorkerRole:
    """State machine of one worker, without sockets, threads and clocks.

    A method that must wait for replies, such as :meth:`join`, is a generator, which is called a procedure here. It
    yields a :class:`Wait` wherever it must wait, and the driver resumes it when the wait is over. During a wait, the
    driver passes arriving messages and views to this object, calls :meth:`on_time`, and sends the messages that
    :attr:`connections` has queued.

    Args:
        specification: The run's specification.
        slices: All slices.
        parameters: The parameters, into which pulled values are written.
        id: Id of this worker.
        incarnation: Incarnation of this worker.
        arrived: Function that is called with the index of each parameter whose new values have arrived.

    Attributes:
        step: Number of the step that this worker works on, or will work on next.
        counters: Numbers of bytes and steps, and waiting times, of this worker.
        first_level: Level of the ladder of encodings that the live worker with the lowest id used in the last step;
            None if the level is not known.
        connections: Connections to the servers.
        pulls: This worker's requests for parameters.
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
        self._slices = slices
        self._arrived = arrived
        self.connections = Connections(specification, slices, id, incarnation)
        local = specification.mode == "local"
        began_with = [torch.zeros(p.shape, dtype=p.dtype) for p in parameters] if local else []
        self.pulls = Pulls(slices, parameters, self.connections, began_with, specification.pulls_changes)
        answers = self.pulls if specification.pipelined else None
        self._outgoing = Outgoing(specification, slices, self.connections, self.counters, began_with, answers)
        # The wait's function that is repeated, if any, and the time of its next call.
        self._repeated: tuple[Callable[[], object] | None, float] = None, 0.0
        self._registration = Registration(self.connections, self.pulls)
        self._initial_values = InitialValues(specification, slices, parameters, self.connections, incarnation > 0)
        # Version of the first slice's values that this worker pulled last; None before the first pull.
        self._version: int | None = None
        self._last_request = 0  # sequence number of the last push or pull that requested values

    @property
    def view(self) -> View:
        """The newest view of the membership that this worker has received."""
        return self.connections.view

    # Procedures, which the driver resumes after each wait

    def initialise(self, optimizer_state: Mapping[str, Any] | None) -> None:
        """Keep the parameters' values as the run's initial values, in case this worker must send them to the servers.

        Only one worker sends the initial values to the servers that have no values yet; see :class:`.InitialValues`.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()``; None if the optimizer has no state.
        """
        self._initial_values.keep(self._outgoing.began_with, optimizer_state)

    def join(self, now: float, has: int | None = None) -> Generator[Wait, None, int]:
        """Take part in all steps from the next step on, and pull the parameters.

        Args:
            now: The time, in seconds.
            has: Number of a step whose gradients this worker already holds; None if it holds none. If the servers have
                not finished this step, the worker may begin with it, and push these gradients.

        Returns:
            The step with which this worker begins.
        """
        self._registration.held_step = has
        yield from self.meet(now)
        steps = yield from self._ask_where_to_begin()
        # Without common steps, the worker must not go back to an earlier step. Servers ignore a push whose step is not
        # later than the step of the worker's last push, because such a push counts as a repeated message.
        self.step = max(steps) if self._specification.aggregates else max(self.step, *steps)
        if self.step > 0:
            self._initial_values.outdate()
        self._registration.enter(self.step)
        self._request(refresh=True)
        for server in self.connections.servers:
            self.hello(server)
        yield self.all_here()
        self._registration.happen(WorkerEvent.HAS_VALUES)
        return self.step

    def leave(self) -> Generator[Wait]:
        """Wait until all pulls have received replies, then leave the run.

        From then on, the other workers do not wait for this worker.
        """
        yield self.all_here()
        self._registration.happen(WorkerEvent.LEAVES)
        yield from self._registration.ask(self.connections.servers, joins=False, leaves=True)

    def refresh(self) -> Generator[Wait]:
        """Pull the servers' current values into the parameters."""
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
        """Return a wait that is over when the pulled values of all parameters have arrived."""
        return Wait(lambda: bool(self.pulls.pending))

    def here(self, index: int) -> Wait:
        """Return a wait that is over when the pulled value of the parameter with this index has arrived.

        This method also records that the current step uses the parameter now; see :meth:`.Pulls.use`.
        """
        self.pulls.use(index)
        return Wait(lambda: self.pulls.waits_for(index))

    # Steps

    @property
    def is_first(self) -> bool:
        """Whether this worker chooses the encodings of its pushes and pulls itself.

        In modes with common steps, only the live worker with the lowest id chooses, and the other workers follow its
        choice.
        """
        return not self._specification.aggregates or self.connections.has_lowest_id

    def encode_as(self, compression: PushCompression, pull_compression: PullCompression, level: int) -> None:
        """Set the compressions of pushes and pulls from the next step on.

        Call this when all pulled values have arrived.

        Args:
            compression: Compression of the pushes.
            pull_compression: Compression of the pulls.
            level: Index of these compressions in the ladder, which the servers report to the other workers.
        """
        self.pulls.encoding = payload_compression(pull_compression).encoding
        self._outgoing.encode_as(compression, self.pulls.encoding, level + 1)

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Begin a step. The gradients that are pushed next belong to this step.

        Call this when all pulled values have arrived. Until :meth:`end_step` returns, the driver must not pass messages
        to this object.

        Args:
            groups: Hyperparameters of each parameter group.
            samples: Number of samples of the worker's batch.
        """
        if self._specification.pipelined:
            self.pulls.begin(self.step + 1)
        self._outgoing.begin(self.step, groups, samples)
        self.counters.samples += samples

    def push(self, index: int, gradient: Tensor) -> None:
        """Push a parameter's gradient; see :meth:`Outgoing.push`."""
        self._outgoing.push(index, gradient)

    def end_step(self) -> None:
        """End the step: finish its pushes, and request the parameters' new values."""
        self._outgoing.finish()
        self.step += 1
        self.counters.steps += 1
        self.pulls.reorder()
        if self._specification.pipelined:
            self._last_request = self.connections.sequence
            return
        self._request(refresh=False)

    # Calls by the driver during a wait

    def begin_waiting(self, now: float, wait: Wait) -> None:
        """Prepare for a wait that begins now. The silence of servers is counted from `now` on."""
        self.connections.begin_waiting(now)
        self._repeated = wait.repeat, self.connections.liveness.now

    def on_time(self, now: float) -> None:
        """Repeat requests, and check whether servers are silent.

        During a wait, the driver calls this several times a second, each time after it has handed over new views.

        Raises:
            ServersUnreachableError: A server was silent for too long.
        """
        liveness = self.connections.liveness
        liveness.pass_to(now)
        repeat, due = self._repeated
        if repeat is not None and liveness.now >= due:
            repeat()
            self._repeated = repeat, liveness.now + REPEAT_SECONDS
        for server in self.connections.unanswering():
            self.hello(server)
        self.connections.check(self._registration.state in TAKES_PART)

    def follow(self, view: View) -> None:
        """Replace the current view by a newer view. A view that is not newer is ignored.

        Raises:
            RemovedError: The new view no longer contains this worker.
        """
        if self.connections.follow(view):
            self._place()

    def on_message(self, server: int, header: Header, payload: memoryview) -> None:
        """Handle a message from a server.

        Raises:
            ServersUnreachableError: The message shows that the run cannot continue.
        """
        if header.kind == Kind.PULLED:
            self._pulled(header, payload)
        elif header.kind == Kind.WELCOME:
            self._welcomed(server, header, payload)

    def _pulled(self, header: Header, payload: memoryview) -> None:
        if not self.pulls.take(header, payload) or self.pulls.states is not None:
            return
        refreshing = self.pulls.refreshing
        # The initial values are out of date as soon as the servers have made a step. Two kinds of replies show this:
        # replies with the values after a push, and replies with current values of a version above 0.
        if not self._initial_values.outdated and (not refreshing or header.base > 0):
            self._initial_values.outdate()
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
        self._registration.welcomes[server] = {**values, "step": header.step}
        self.connections.check_deaf(server, values["deaf"])
        # The server received the HELLO after all earlier messages of this worker. If a push or pull has no reply,
        # either the message was lost, or the server keeps the message until the step is complete. WELCOME lists the
        # slices of the kept messages, so send the messages of all other slices again.
        if values["held"] and answered_request > self._last_request:
            unsettled = (self._outgoing.unanswered.keys() | self.pulls.pending.keys()).intersection(server_keys)
            held = set(unpack_keys(payload[header.meta :]))
            if unsettled - held:
                self._send_again([key for key in server_keys if key not in held])
            elif not unsettled:
                # This worker needs no reply from the server. But the server votes on the members of the step, and
                # cannot vote if the BEGIN message was lost, so send BEGIN again.
                self._outgoing.begin_again((server,), self.step)
        self._initial_values.on_welcome(server, values)

    # Registration with the servers

    def meet(self, now: float) -> Generator[Wait]:
        """Wait until all servers are members, and each of them has replied to this worker's HELLO."""
        self.connections.liveness.listen(now)
        yield from self._meet()

    def _meet(self) -> Generator[Wait]:
        self.connections.begin_meeting()
        yield Wait(lambda: not self.connections.met())
        self._place()
        yield from self._registration.ask(self.connections.servers, joins=False)

    def _ask_where_to_begin(self) -> Generator[Wait, None, list[int]]:
        """Ask the servers which step this worker begins with, and return the steps in their replies.

        In modes with common steps only the leader is asked. In other modes all servers are asked.
        """
        aggregates = self._specification.aggregates
        while True:
            # The leader may die before it replies, or a different server may become the leader. Then ask again.
            asked = self._registration.leaders if aggregates else self.connections.servers
            answers = yield from self._registration.ask(asked, joins=True)
            if answers and (not aggregates or all(answer["leader"] is True for answer in answers.values())):
                return [welcome["step"] for welcome in answers.values()]
            yield from self._meet()

    def hello(self, server: int) -> None:
        """Probe a server with a HELLO message, which reports a step of this worker.

        As long as pushes of the last finished step have no reply, the message reports that step. Once all these pushes
        have a reply, the message reports the next step. Before this worker has joined, the message reports `NO_STEP`.
        """
        state = self._registration.state
        if state not in TAKES_PART:
            self._registration.send_hello(server, NO_STEP, False)
            return
        step, server_keys, answered = self.step, self.connections.of(server), list[int]()
        if state == WorkerState.ENTERING:
            answered = [key for key in server_keys if key not in self.pulls.pending]
        elif self._outgoing.unanswered and self.pulls.pending and not self.pulls.refreshing:
            step -= 1
            answered = [key for key in server_keys if key not in self._outgoing.unanswered]
        self._registration.send_hello(server, step, True, answered)

    # Requests for values, and messages that are sent again

    def _place(self) -> None:
        """Determine each slice's primary in the current view.

        If a slice has a new primary, the pushes and pulls of the slice that have no reply are sent to the new primary.
        """
        moved = self.connections.place()
        if self._registration.state in TAKES_PART:
            for server in self.connections.servers:
                self.hello(server)
        self._send_again(moved)

    def _request(self, refresh: bool, states: bool = False) -> None:
        """Request the values of all parameters, or the optimizer's state of all slices; see :meth:`.Pulls.request`."""
        self.pulls.request(self.step, refresh, states)
        self._last_request = self.connections.sequence

    def _send_again(self, keys: list[int]) -> None:
        self._outgoing.send_again(keys, self.step)
        # If each push also requests the slice's new values, the repeated pushes above are enough.
        if not self._specification.pipelined or self.pulls.refreshing:
            self.pulls.send_again(keys)
        self._last_request = self.connections.sequence
