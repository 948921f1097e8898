"""A worker's connection to the servers."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.allocation import reuse_freed_memory
from cnnstrategies.paramserver.core.view import ViewSource
from cnnstrategies.paramserver.counters import Counters
from cnnstrategies.paramserver.links import POLL_SECONDS, Links
from cnnstrategies.paramserver.messages import NO_STEP, Encoding, Header, Kind, pack_keys, unpack_json, unpack_keys
from cnnstrategies.paramserver.optimizer_state import join_state
from cnnstrategies.paramserver.outgoing import Outgoing
from cnnstrategies.paramserver.placement import Placement
from cnnstrategies.paramserver.pulls import Pulls
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.state_transfer import InitialValues, StateReceipt

PROBE_SECONDS = 1.0  # without an answer before a server is asked whether it is there


class Worker:
    """A worker's side. Used by one thread (the one that runs backward on the CPU, or the caller of `push`).

    A step is::

        worker.begin_step(hyperparameters(optimizer), samples)   # before the backward that pushes
        worker.push(index, gradient)                             # as each gradient gets ready; does not block
        worker.end_step()                                        # after backward: asks for the new parameters
        worker.wait(index)                                       # before a parameter is used again

    In mode ``local`` what is pushed are the parameters themselves, every k-th step of the worker's own optimizer.

    Args:
        specification: What all processes of the run agree on.
        parameters: The parameters in the specification's order; pulled values are written into them, in place.
        views: Tells of the membership.
        id: This worker's number in the views.
        incarnation: Its incarnation in the views.
        keys: CURVE keys; None for no encryption.
        insecure: Allow `keys` None with servers on other machines.

    Attributes:
        step: Number of the step that is or will be worked on next, counted from the start of the run; a worker that
            joins later starts with that of the others.
        counters: What was sent, received and waited.
        trace: Set it to a list to have it filled with (``"push"``, ``"arrived"`` or ``"wait"``, index of the parameter,
            time by ``time.perf_counter()``): when a gradient was handed over, when the last part of a parameter came,
            and when a wait for one ended.

    Raises:
        ConfigurationError: The parameters are not those of the specification.
    """

    step: int
    counters: Counters
    trace: list[tuple[str, int, float]] | None

    def __init__(
        self,
        specification: Specification,
        parameters: Sequence[Tensor],
        views: ViewSource,
        id: int,
        incarnation: int = 0,
        keys: KeyPair | None = None,
        insecure: bool = False,
    ) -> None:
        given = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
        expected = [(parameter.shape, getattr(torch, parameter.dtype)) for parameter in specification.parameters]
        if given != expected:
            raise ConfigurationError(
                f"the parameters have the shapes and types {given}, the specification's are {expected}: give the "
                "parameters that it was made from, in its order"
            )
        self.step = 0
        self.counters = Counters()
        self.trace = None
        self._specification = specification
        self._parameters = parameters
        self._slices = cut(specification)
        reuse_freed_memory()
        self._links = Links(specification, self._slices, views, id, incarnation, keys, insecure)
        self._placement = Placement(self._slices)
        self._outgoing = Outgoing(specification, self._slices, self._links, self._placement, self.counters)
        self._pulls = Pulls(self._slices, parameters, self._links, self._placement)
        self._joined = False
        self._welcomes: dict[int, tuple[int, int, dict[str, Any]]] = {}
        self._initial: InitialValues | None = None
        self._moved = False  # The parameters are no longer those of the run's start.
        self._asked = 0  # Number of the last message that asks for what is under way.
        self._state: StateReceipt | None = None

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Give the servers the values of the parameters, and the optimizer's state if there is some.

        One worker calls it before its :meth:`join` (any number may: servers take the first values that come, and a
        server that has some ignores it).

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        self._meet()
        self._initial = InitialValues(self._links, self._specification, self._slices, self._parameters, optimizer_state)
        for server in self._links.view.servers:
            self._initial.send(server.id)

    def join(self) -> int:
        """Become a member at a step boundary: from the returned step on the others wait for this worker (in sync).

        Writes the servers' values into the parameters. Waits until some worker has called :meth:`initialise`.

        Returns:
            The step to begin with, also in :attr:`step`.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        self._meet()
        if self._specification.aggregates:
            # One that dies before it has answered is no longer there to be asked: then another leads.
            while not (answers := self._ask(self._leaders(), joins=True)):
                self._meet()
        else:
            while not (answers := self._ask(self._everyone(), joins=True)):
                self._meet()  # The only server has died, and another takes its place.
        steps = [step for step, _, _ in answers.values()]
        # Never back where servers take a push with the number of an older one for the same push again.
        self.step = max(steps) if self._specification.aggregates else max(self.step, *steps)
        self._moved = self._moved or self.step > 0
        self._joined = True
        for server in self._links.view.servers:
            self._hello(server.id)
        self._request(refresh=True)
        self.wait_all()
        return self.step

    def leave(self) -> None:
        """Wait for the pulls that are under way, and no longer be waited for; :meth:`join` comes back."""
        self.wait_all()
        self._joined = False
        while any(values["counted"] for _, _, values in self._ask(self._everyone(), joins=False, leaves=True).values()):
            pass  # One has not heard of it: the connection was cut just then.

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's pushes.

        Args:
            groups: The hyper-parameters of each parameter group now, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` gives them.
            samples: How many samples the gradient is a mean of: the weight of this worker in sync and local.

        Raises:
            ConfigurationError: One of these is no finite number, or no number any more: it is named.
        """
        self.wait_all()
        self._outgoing.begin(self.step, groups, samples)

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, without waiting and without a copy of what lies in CPU memory.

        The tensor's memory must stay as it is until the parameter has been pulled (``zero_grad`` with its default
        ``set_to_none=True`` is no harm: a reference is kept).

        Args:
            index: Index of the parameter.
            gradient: Its gradient, of its shape and type; in mode ``local`` its value.

        Raises:
            ConfigurationError: It has another shape or type: servers would drop it, and the step never end.
        """
        parameter = self._parameters[index]
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ConfigurationError(
                f"parameter {self._specification.parameters[index].name} is {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}, its gradient {gradient.dtype} of shape {tuple(gradient.shape)}: push a "
                "gradient of the same type and shape"
            )
        self._note("push", index)
        self._outgoing.push(index, gradient)

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient; ask for the new parameters.

        They are asked for in the order in which :meth:`wait` was called for them in the step before.
        """
        self._outgoing.finish()
        self.step += 1
        self.counters.steps += 1
        self._pulls.reorder()
        self._request(refresh=False)

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing came within the specification's time-out; names the servers.
            RemovedError: A newer view no longer contains this worker.
        """
        self._pulls.use(index)
        if self._pulls.waits_for(index):
            self._wait_while(lambda: self._pulls.waits_for(index))
        self._note("wait", index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises what :meth:`wait` raises."""
        if self._pulls.under_way:
            self._wait_while(lambda: self._pulls.under_way)

    def refresh(self) -> None:
        """Write the servers' present values into all parameters, between two steps: in async others go on.

        Raises what :meth:`wait` raises.
        """
        self.wait_all()
        self._request(refresh=True)
        self.wait_all()

    def optimizer_state(self) -> dict[str, Any]:
        """The servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters.

        To be called between steps, by one worker while the others do not push, so that it is of one moment.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        self.wait_all()
        while (state := self._ask_for_state()) is None:
            pass  # A server has died or was replaced meanwhile.
        return join_state(self._specification, self._slices, state.states, self._outgoing.options)

    def close(self) -> None:
        """Close the sockets; nothing more is sent."""
        self._links.close()

    def _ask_for_state(self) -> StateReceipt | None:
        """Ask for the optimizer state of all slices; None if it did not come from the same servers to the end."""
        owners = self._placement.owners
        servers = self._placement.servers()
        self._ask(servers, joins=False)  # Until they know as well as this worker which slices they answer for.
        state = self._state = StateReceipt(self._slices)
        for server in servers:
            self._ask_for_part(server)
        self._wait_while(lambda: self._placement.owners == owners and not state.complete)
        self._state = None
        return state if self._placement.owners == owners else None

    def _ask_for_part(self, server: int) -> None:
        """Ask a server for its part of the state, from the beginning."""
        assert self._state is not None
        if not self._state.has(server):
            self._state.begin(server, self._links.sequence + 1)
            self._links.send(server, Kind.GET_STATE, step=self._links.sequence + 1)

    def _request(self, refresh: bool) -> None:
        """Ask for all parameters."""
        self._pulls.request(self.step, refresh)
        self._asked = self._links.sequence

    # Membership

    def _meet(self) -> None:
        """Wait until the run's servers are there and know this worker."""
        self._links.wait_for_members()
        self._place()
        self._ask(self._everyone(), joins=False)

    def _everyone(self) -> set[int]:
        return {server.id for server in self._links.view.servers}

    def _ask(self, servers: set[int], joins: bool, leaves: bool = False) -> dict[int, tuple[int, int, dict[str, Any]]]:
        """Say hello, or goodbye, until those of some servers that live have answered; their answers."""
        asked = self._links.sequence
        self._welcomes = {}

        def ask() -> None:
            for server in servers:
                if leaves:
                    self._links.send(server, Kind.LEAVE, step=self.step)
                self._say_hello(server, NO_STEP, joins)

        def waiting() -> bool:
            alive = servers & self._everyone()
            return any(server not in self._welcomes or self._welcomes[server][1] <= asked for server in alive)

        self._wait_while(waiting, ask)
        return self._welcomes

    def _leaders(self) -> set[int]:
        """The server that says it leads, if one does."""
        return {server for server, (_, _, told) in self._welcomes.items() if told.get("leader") is True}

    def _say_hello(self, server: int, step: int, joins: bool, answered: Sequence[int] = ()) -> None:
        view, keys = self._links.view.number, pack_keys(answered)
        said = {"joins": joins, "request": self._pulls.step if self._pulls.under_way else None}
        self._links.send(server, Kind.HELLO, keys, said, step=step, base=view, encoding=Encoding.KEYS)

    def _hello(self, server: int) -> None:
        """Say where this worker is: at the step whose pushes are not all answered, else at the next."""
        if not self._joined:
            self._say_hello(server, NO_STEP, False)
        elif self._outgoing.unanswered and self._pulls.under_way and not self._pulls.refreshing:
            answered = [key for key in self._placement.of(server) if not self._outgoing.waits(key)]
            self._say_hello(server, self.step - 1, True, answered)
        else:
            self._say_hello(server, self.step, True)

    def _place(self) -> None:
        """Find each slice's primary in the present view; send it what the last one has not answered."""
        moved = self._placement.follow(self._links.view)
        if self._joined:
            for server in self._links.view.servers:
                self._hello(server.id)
        self._send_again(moved)

    def _send_again(self, keys: list[int]) -> None:
        self._outgoing.send_again(keys, self.step)
        self._pulls.send_again(keys)
        self._asked = self._links.sequence

    # Receipts

    def _wait_while(self, waiting: Callable[[], bool], repeat: Callable[[], object] | None = None) -> None:
        """Handle messages and changes of the view while a condition holds.

        Args:
            waiting: The condition.
            repeat: Called at once, and again several times a second.
        """
        begun = time.monotonic()
        self._links.begin_waiting()
        next_repeat = begun
        while waiting():
            now = time.monotonic()
            if repeat is not None and now >= next_repeat:
                repeat()
                next_repeat = now + POLL_SECONDS
            for server in self._links.unanswering(min(PROBE_SECONDS, self._specification.timeout / 4)):
                self._hello(server)
            changed = self._links.follow()
            if changed:
                self._place()
            self._links.check(self._placement.orphans if self._joined else 0)
            for server, header, payload in self._links.receive(POLL_SECONDS):
                self._handle(server, header, payload)
                if not waiting():
                    break
        self.counters.seconds_waited += time.monotonic() - begun

    def _handle(self, server: int, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.PULLED:
            self._pulled(header, payload)
        elif header.kind == Kind.WELCOME:
            values = unpack_json(payload, header)
            if values.get("again") is True:
                self._send_again(self._placement.of(server))
                return
            asked = int(values["asked"])
            self._welcomes[server] = header.step, asked, values
            self._links.check_deaf(server, values["deaf"])
            # It has answered what came before the question: what is still open then has been lost, or it holds it.
            if values["held"] and asked > self._asked:
                held = set(unpack_keys(payload[header.meta :]))
                own = self._placement.of(server)
                lost = [key for key in own if key not in held]
                # One without slices of its own votes too, and must hear that the step has begun.
                if not own or self._outgoing.open_among(lost) or self._pulls.open_among(lost):
                    self._send_again(lost)
            if self._state is not None and asked > self._state.asked(server):
                self._ask_for_part(server)
            if values["ready"] is False and self._moved:
                self._links.lost(server)
            elif values["ready"] is False and self._initial is not None:
                self._initial.send(server)  # It was started again before it had made a step.
        elif header.kind == Kind.STATE_IS and self._state is not None:
            self._state.take(server, header, payload)

    def _pulled(self, header: Header, payload: memoryview) -> None:
        if not self._pulls.take(header, payload):
            return
        if not self._pulls.refreshing:
            self._moved, self._initial = True, None
        self.counters.bytes_received += len(payload)
        self._outgoing.answered(header.key)
        index = self._slices[header.key].parameter
        if not self._pulls.waits_for(index):
            self._note("arrived", index)

    def _note(self, what: str, index: int) -> None:
        if self.trace is not None:
            self.trace.append((what, index, time.perf_counter()))
