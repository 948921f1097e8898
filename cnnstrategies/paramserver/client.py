"""A worker's connection to the servers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.allocation import reuse_freed_memory
from cnnstrategies.paramserver.compression import Encoder, as_bytes, check_length, decode
from cnnstrategies.paramserver.links import POLL_SECONDS, Links
from cnnstrategies.paramserver.messages import NO_STEP, Encoding, Header, Kind, unpack_json
from cnnstrategies.paramserver.optimizers import StateValue, cut_state, join_state
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.slicing import cut, holders
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.state_messages import pack_state, unpack_state
from cnnstrategies.paramserver.view import ViewSource

PROBE_SECONDS = 1.0  # without an answer before a server is asked whether it is there


@dataclass
class Counters:
    """What a worker has sent, received and waited since it was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulls, headers included.
        seconds_waited: Time in :meth:`Worker.wait` and in :meth:`Worker.wait_all`.
        steps: Steps finished.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0


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
        shapes = [tuple(parameter.shape) for parameter in parameters]
        expected = [parameter.shape for parameter in specification.parameters]
        if shapes != expected:
            raise ConfigurationError(
                f"the parameters have the shapes {shapes}, the specification's are {expected}: give the parameters "
                "that it was made from, in its order"
            )
        self.step = 0
        self.counters = Counters()
        self.trace = None
        self._specification = specification
        self._parameters = parameters
        self._slices = cut(specification)
        self._by_parameter: list[list[int]] = [[] for _ in parameters]
        for slice_ in self._slices:
            self._by_parameter[slice_.parameter].append(slice_.key)
        self._targets = [Target(parameter) for parameter in parameters]
        self._encoders = [Encoder(specification.compression, specification.compression_ratio) for _ in self._slices]
        reuse_freed_memory()
        self._links = Links(specification, self._slices, views, id, incarnation, keys, insecure)
        self._owners: list[tuple[int, int]] = [(-1, 0)] * len(self._slices)
        self._orphans = 0
        self._options = [group.options for group in specification.groups]
        self._begin: tuple[int, dict[str, Any], float] | None = None
        self._unanswered: dict[int, tuple[Any, Encoding]] = {}
        self._pushed: set[int] = set()
        self._clipped: dict[int, Tensor] = {}
        self._pending: dict[int, int] = {}
        self._left = [0] * len(parameters)
        self._refreshing = False
        self._order: list[int] = list(range(len(parameters)))
        self._used: dict[int, None] = {}
        self._joined = False
        self._welcomes: dict[int, tuple[int, int, dict[str, Any]]] = {}
        self._first: dict[int, dict[str, StateValue]] | None = None
        self._moved = False  # The parameters are no longer those of the run's start.
        self._state_request = 0
        self._states: dict[int, dict[str, StateValue]] = {}
        self._state_counts: dict[int, int] = {}
        self._states_received: dict[int, int] = {}

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
        self._first = {} if optimizer_state is None else cut_state(self._specification, self._slices, optimizer_state)
        for server in self._links.view.servers:
            self._send_first(server.id)

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
            answers = self._ask({server.id for server in self._links.view.servers}, joins=True)
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
        for server in self._links.view.servers:
            self._links.send(server.id, Kind.LEAVE, step=self.step)

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's pushes.

        Args:
            groups: The hyper-parameters of each parameter group now, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` gives them.
            samples: How many samples the gradient is a mean of: the weight of this worker in sync and local.
        """
        if any(self._left):
            self.wait_all()
        self._options = [
            {name: values[name] for name in group.options}
            for group, values in zip(self._specification.groups, groups, strict=True)
        ]
        self._begin = self.step, {"options": self._options}, float(samples)
        self._unanswered.clear()
        self._pushed.clear()
        for server in self._links.view.servers:
            self._send_begin(server.id)

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, without waiting and without a copy of what lies in CPU memory.

        The tensor's memory must stay as it is until the parameter has been pulled (``zero_grad`` with its default
        ``set_to_none=True`` is no harm: a reference is kept).

        Args:
            index: Index of the parameter.
            gradient: Its gradient, of its shape; in mode ``local`` its value.
        """
        assert self._begin is not None, "push before begin_step"
        self._pushed.add(index)
        self._note("push", index)
        flat = gradient.detach().to("cpu").contiguous().view(-1)
        if not self._specification.aggregates:
            if self._specification.clip_norm is not None:
                self._clipped[index] = flat
                return
            if self._specification.clip_value is not None:
                flat = flat.clamp(-self._specification.clip_value, self._specification.clip_value)
        self._push(index, flat)

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient; ask for the new parameters.

        They are asked for in the order in which :meth:`wait` was called for them in the step before.
        """
        if self._clipped:
            gradients = list(self._clipped.values())
            norm = torch.nn.utils.get_total_norm(gradients)
            assert self._specification.clip_norm is not None
            factor = torch.clamp(self._specification.clip_norm / (norm + 1e-6), max=1.0)
            for index, gradient in self._clipped.items():
                self._push(index, gradient * factor)
            self._clipped.clear()
        for index, keys in enumerate(self._by_parameter):
            if index not in self._pushed:
                for key in keys:
                    self._unanswered[key] = b"", Encoding.NOTHING
                    self._send_push(key)
        self.step += 1
        self.counters.steps += 1
        if len(self._used) == len(self._parameters):
            self._order = list(self._used)
        self._used = {}
        self._request(refresh=False)

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing came within the specification's time-out; names the servers.
            RemovedError: A newer view no longer contains this worker.
        """
        self._used.setdefault(index)
        if self._left[index]:
            self._wait_while(lambda: self._left[index] > 0)
        self._note("wait", index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises what :meth:`wait` raises."""
        if any(self._left):
            self._wait_while(lambda: bool(self._pending))

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
        while not self._ask_for_states():
            pass  # A server has died or was replaced meanwhile.
        return join_state(self._specification, self._slices, self._states, self._options)

    def close(self) -> None:
        """Close the sockets; nothing more is sent."""
        self._links.close()

    def _ask_for_states(self) -> bool:
        """Ask for the optimizer state of all slices; whether it came from the same servers to the end."""
        owners = self._owners
        servers = {server for server, _ in owners}
        self._ask(servers, joins=False)  # Until they know as well as this worker which slices they answer for.
        self._state_request += 1
        self._states = {slice_.key: {} for slice_ in self._slices}
        self._state_counts = {}
        self._states_received = dict.fromkeys(servers, 0)
        for server in servers:
            self._links.send(server, Kind.GET_STATE, step=self._state_request)

        def waiting() -> bool:
            return any(self._state_counts.get(server, -1) != self._states_received[server] for server in servers)

        self._wait_while(lambda: self._owners == owners and waiting())
        return self._owners == owners

    # Sends

    def _send_first(self, server: int) -> None:
        """Send a server the first values of its slices."""
        assert self._first is not None
        for slice_ in self._slices:
            if server in slice_.servers:
                value = self._parameters[slice_.parameter].detach().cpu().reshape(-1)[slice_.start : slice_.stop]
                for name, part in self._first.get(slice_.key, {}).items():
                    described, raw = pack_state(name, part)
                    self._links.send(server, Kind.STATE, raw, key=slice_.key, json=described)
                # A copy: the values are pulled into the same memory, maybe before they have left.
                payload = bytes(as_bytes(value.contiguous()))
                self._links.send(server, Kind.VALUE, payload, key=slice_.key, encoding=Encoding.DENSE)

    def _push(self, index: int, flat: Tensor) -> None:
        for key in self._by_parameter[index]:
            slice_, encoder = self._slices[key], self._encoders[key]
            self._unanswered[key] = encoder.encode(flat[slice_.start : slice_.stop]), encoder.encoding
            self._send_push(key)

    def _send_begin(self, server: int) -> None:
        assert self._begin is not None
        step, values, samples = self._begin
        self._links.send(server, Kind.BEGIN, step=step, weight=samples, json=values)

    def _send_push(self, key: int) -> None:
        assert self._begin is not None
        payload, encoding = self._unanswered[key]
        self.counters.bytes_sent += self._links.send(
            self._owners[key][0], Kind.PUSH, payload, key=key, step=self._begin[0], encoding=encoding
        )

    def _request(self, refresh: bool) -> None:
        keys = [key for index in self._order for key in self._by_parameter[index]]
        self._refreshing = refresh
        self._pending = dict.fromkeys(keys, self.step)
        self._left = [len(own) for own in self._by_parameter]
        self._send_pulls(keys)

    def _send_pulls(self, keys: Sequence[int]) -> None:
        by_server: dict[int, list[int]] = {server.id: [] for server in self._links.view.servers}
        for key in keys:
            by_server.setdefault(self._owners[key][0], []).append(key)
        for server, wanted in by_server.items():
            payload = np.array(wanted, "<u4").tobytes()
            self._links.send(
                server, Kind.PULL, payload, step=self.step, base=int(self._refreshing), encoding=Encoding.KEYS
            )

    # Membership

    def _meet(self) -> None:
        """Wait until the run's servers are there and know this worker."""
        self._links.wait_for_members()
        self._place()
        self._ask({server.id for server in self._links.view.servers}, joins=False)

    def _ask(self, servers: set[int], joins: bool) -> dict[int, tuple[int, int, dict[str, Any]]]:
        """Say hello until those of some servers that live have answered; their answers."""
        asked = self._links.sequence
        self._welcomes = {}
        step = NO_STEP

        def ask() -> None:
            for server in servers:
                self._say_hello(server, step, joins)

        def waiting() -> bool:
            alive = servers & {server.id for server in self._links.view.servers}
            return any(server not in self._welcomes or self._welcomes[server][1] <= asked for server in alive)

        self._wait_while(waiting, ask)
        return self._welcomes

    def _leaders(self) -> set[int]:
        """The server that says it leads, if one does."""
        return {server for server, (_, _, told) in self._welcomes.items() if told.get("leader") is True}

    def _say_hello(self, server: int, step: int, joins: bool) -> None:
        self._links.send(server, Kind.HELLO, step=step, base=self._links.view.number, json={"joins": joins})

    def _hello(self, server: int) -> None:
        """Say where this worker is: at the step whose pushes are not all answered, else at the next."""
        if self._joined:
            waiting = self._unanswered and self._pending and not self._refreshing
            self._say_hello(server, self.step - 1 if waiting else self.step, True)
        else:
            self._say_hello(server, NO_STEP, False)

    def _place(self) -> None:
        """Find each slice's primary in the present view; send it what the last one has not answered."""
        view = self._links.view
        since = {server.id: server.since for server in view.servers}
        before = self._owners
        primaries = [next(iter(holders(slice_, view)), -1) for slice_ in self._slices]
        self._owners = [(primary, since.get(primary, 0)) for primary in primaries]
        self._orphans = primaries.count(-1)
        if self._joined:
            for server in view.servers:
                self._hello(server.id)
        self._send_again([key for key, owner in enumerate(self._owners) if owner != before[key]])

    def _send_again(self, keys: Sequence[int]) -> None:
        """Send the pushes and pulls of some slices that have not been answered."""
        pushes = [key for key in keys if key in self._unanswered]
        # Also in the middle of a step that has pushed nothing yet: a new server must hear of it.
        if self._begin is not None and (self._unanswered or self._begin[0] == self.step):
            for server in {server.id for server in self._links.view.servers}:
                self._send_begin(server)
        for key in pushes:
            self._send_push(key)
        pulls = [key for key in self._pending if key in set(keys)]
        if pulls:
            self._send_pulls(pulls)

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
            for server in self._links.silent(min(PROBE_SECONDS, self._specification.timeout / 4)):
                self._hello(server)
            changed = self._links.follow()
            if changed:
                self._place()
            self._links.check(self._orphans if self._joined else 0)
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
                self._send_again([key for key, owner in enumerate(self._owners) if owner[0] == server])
                return
            self._welcomes[server] = header.step, int(values["asked"]), values
            if values["ready"] is False and self._joined and self._moved:
                self._links.lost(server)
            elif values["ready"] is False and self._first is not None:
                self._send_first(server)  # It was started again before it had made a step.
        elif header.kind == Kind.STATE_IS and header.step == self._state_request and server in self._states_received:
            if header.meta:
                name, value = unpack_state(unpack_json(payload, header), payload[header.meta :])
                self._states[header.key][name] = value
                self._states_received[server] += 1
            else:
                self._state_counts[server] = header.base

    def _pulled(self, header: Header, payload: memoryview) -> None:
        if self._pending.get(header.key) != header.step:
            return
        slice_ = self._slices[header.key]
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        values = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        if not self._refreshing:
            self._moved, self._first = True, None
        self._targets[slice_.parameter].write(slice_.start, values)
        self.counters.bytes_received += len(payload)
        del self._pending[header.key]
        self._unanswered.pop(header.key, None)
        self._left[slice_.parameter] -= 1
        if not self._left[slice_.parameter]:
            self._targets[slice_.parameter].finish()
            self._note("arrived", slice_.parameter)

    def _note(self, what: str, index: int) -> None:
        if self.trace is not None:
            self.trace.append((what, index, time.perf_counter()))


class Target:
    """Where a parameter's pulled values are written: its own memory, or a buffer if that is not flat CPU memory.

    Args:
        parameter: The parameter.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter.detach()
        self._direct = parameter.device.type == "cpu" and parameter.is_contiguous()
        self._flat = self._parameter.view(-1) if self._direct else torch.empty(0)

    def write(self, start: int, values: Tensor) -> None:
        """Write a slice."""
        if not self._direct and not self._flat.numel():
            self._flat = torch.empty(self._parameter.numel(), dtype=self._parameter.dtype)
        self._flat[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """All slices are written."""
        if not self._direct:
            self._parameter.copy_(self._flat.view(self._parameter.shape))
