"""A worker's registration with the servers, and the initial values, which a worker sends to servers without values.

docs/development/states.md draws the table `REGISTRATION`.
"""

from collections.abc import Generator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.core.node import StateTable
from cnnstrategies.paramserver.messages import NO_STEP, Encoding, Kind, pack_keys
from cnnstrategies.paramserver.optimizer_state import SliceState, cut_state, pack_state
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.connections import Connections, Wait
from cnnstrategies.paramserver.worker.pulls import Pulls


class WorkerState(StrEnum):
    """States of a worker's registration with the servers.

    Attributes:
        OUTSIDE: The worker has not taken part in steps yet.
        ENTERING: The worker takes part, and waits for the values with which its first step begins.
        TRAINING: The worker takes part, and has had the values of its first step.
        AWAY: The worker has left, at the end of the run, or in mode ssp at the end of an epoch.
    """

    OUTSIDE = "outside"
    ENTERING = "entering"
    TRAINING = "training"
    AWAY = "away"


class WorkerEvent(StrEnum):
    """Events that change the state of a worker's registration.

    Attributes:
        LEARNS_ITS_STEP: The servers have replied with the step with which the worker begins.
        HAS_VALUES: The values of all parameters have arrived.
        LEAVES: The worker leaves.
    """

    LEARNS_ITS_STEP = "learns its step"
    HAS_VALUES = "has values"
    LEAVES = "leaves"


OUTSIDE, ENTERING, TRAINING, AWAY = WorkerState
LEARNS_ITS_STEP, HAS_VALUES, LEAVES = WorkerEvent
REGISTRATION = StateTable(
    "registration of a worker",
    OUTSIDE,
    {
        OUTSIDE: {LEARNS_ITS_STEP: ENTERING, LEAVES: OUTSIDE},
        ENTERING: {HAS_VALUES: TRAINING, LEAVES: OUTSIDE},
        TRAINING: {LEAVES: AWAY},
        AWAY: {LEARNS_ITS_STEP: ENTERING, LEAVES: AWAY},
    },
)
TAKES_PART = frozenset({WorkerState.ENTERING, WorkerState.TRAINING})  # states in which the servers count on the worker
HAS_HAD_VALUES = frozenset({WorkerState.TRAINING, WorkerState.AWAY})


class Registration:
    """A worker's registration with the servers.

    Args:
        connections: Connections to the servers.
        pulls: The worker's requests for parameters.

    Attributes:
        state: State of the registration; see `REGISTRATION`.
        welcomes: By server id: JSON object of the server's last WELCOME message, with the message's step as `step`.
            Cleared when :meth:`ask` begins.
        held_step: While the worker joins: the step whose gradients it already has; None if there is no such step.
    """

    def __init__(self, connections: Connections, pulls: Pulls) -> None:
        self.state = REGISTRATION.start
        self.welcomes: dict[int, Mapping[str, Any]] = {}
        self.held_step: int | None = None
        self._first_step = 0  # the first step in which this worker took part
        self._connections = connections
        self._pulls = pulls

    @property
    def leaders(self) -> set[int]:
        """Ids of the servers that have replied that they are the leader."""
        return {server for server, welcome in self.welcomes.items() if welcome["leader"] is True}

    def enter(self, step: int) -> None:
        """Take part from a step on."""
        self.happen(WorkerEvent.LEARNS_ITS_STEP)
        self._first_step, self.held_step = step, None

    def happen(self, event: WorkerEvent) -> None:
        """Change the state after an event."""
        self.state = REGISTRATION.after(self.state, event)

    def ask(
        self, servers: set[int], joins: bool, leaves: bool = False
    ) -> Generator[Wait, None, dict[int, Mapping[str, Any]]]:
        """Send HELLO messages to some servers until each live server among them has replied with WELCOME.

        Args:
            servers: Ids of the servers.
            joins: Whether this worker joins.
            leaves: Whether this worker leaves.

        Returns:
            By server id: the JSON object of the server's WELCOME, as in :attr:`welcomes`.
        """
        requests: set[int] = set()
        self.welcomes = {}

        def ask() -> None:
            for server in servers & self._connections.servers:
                self.send_hello(server, NO_STEP, joins, leaves=leaves)
                requests.add(self._connections.sequence)

        def answers() -> dict[int, Mapping[str, Any]]:
            # Ignore a WELCOME that replies to an earlier HELLO or to a probe, because it may contain a different step.
            return {
                server: welcome
                for server, welcome in self.welcomes.items()
                if server in servers and welcome["asked"] in requests
            }

        yield Wait(lambda: bool(servers & self._connections.servers - answers().keys()), ask)
        return answers()

    def send_hello(
        self, server: int, step: int, joins: bool, answered: Sequence[int] = (), leaves: bool = False
    ) -> None:  # fmt: skip
        """Send a HELLO message to a server.

        Args:
            server: Id of the server.
            step: The step that the message reports; `NO_STEP` for none.
            joins: Whether this worker takes part in steps.
            answered: Keys of the slices whose values have arrived.
            leaves: Whether this worker leaves.
        """
        fields: dict[str, Any] = {
            "joins": joins,
            "leaves": leaves,
            "first": self._first_step,
            "given": self.state in HAS_HAD_VALUES,
            "request": self._pulls.step if self._pulls.pending else None,
            "has": self.held_step,
        }
        self._connections.send(
            server, Kind.HELLO, pack_keys(answered), json=fields, step=step, base=self._connections.view.number,
            encoding=Encoding.KEYS,
        )  # fmt: skip


class InitialValues:
    """A worker's copy of the run's initial values. It becomes outdated once the servers have made a step.

    Args:
        specification: The run's specification.
        slices: All slices.
        parameters: The parameters.
        connections: Connections to the servers.
        replaces: Whether this worker replaces an earlier process with the same id.

    Attributes:
        outdated: Whether the run has made a step, after which servers without values have lost them.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        parameters: Sequence[Tensor],
        connections: Connections,
        replaces: bool,
    ) -> None:
        self.outdated = False
        self._specification = specification
        self._slices = slices
        self._parameters = parameters
        self._connections = connections
        self._replaces = replaces
        self._kept: tuple[Sequence[Tensor], dict[int, SliceState]] | None = None
        # By id of a server without values: time at which this worker noticed that the values are missing.
        self._unready: dict[int, float] = {}

    def keep(self, copies: Sequence[Tensor], optimizer_state: Mapping[str, Any] | None) -> None:
        """Keep the parameters' values, in case this worker must send them to the servers.

        Args:
            copies: Tensors to which the values are copied, because the worker's own steps may change the parameters
                before the values are sent; empty for no copies.
            optimizer_state: A plain ``Optimizer.state_dict()``; None if the optimizer has no state.
        """
        for copy, parameter in zip(copies, self._parameters, strict=bool(copies)):
            copy.copy_(parameter.detach())
        states: dict[int, SliceState] = {}
        if optimizer_state is not None:
            states = cut_state(self._specification, self._slices, optimizer_state)
        self._kept = copies or self._parameters, states

    def outdate(self) -> None:
        """Drop the values, because the run has made a step."""
        self.outdated, self._kept = True, None

    def on_welcome(self, server: int, welcome: Mapping[str, Any]) -> None:
        """Send a server its initial values, if it has none and this worker is responsible.

        Args:
            server: Id of the server.
            welcome: JSON object of the server's WELCOME message.

        Raises:
            ServersUnreachableError: The server has lost its values, or no live worker has initial values.
        """
        if welcome["ready"] is not False:
            self._unready.pop(server, None)
        elif self.outdated or welcome["lost"] or self._waits_in_vain(server):
            self._connections.lost(server)
        # The server has no initial values yet, because it is new or was started again before the first step.
        elif self._kept is not None and self._connections.is_first_source:
            self._send(server, *self._kept)

    def _send(self, server: int, values: Sequence[Tensor], states: Mapping[int, SliceState]) -> None:
        """Send the initial values of a server's slices. The server ignores them for slices that have values."""
        for key in self._connections.of(server):
            pieces = [
                values[part.parameter].detach().cpu().reshape(-1)[part.start : part.stop]
                for part in self._slices[key].parts
            ]
            # Copy the values into the payload: a pull may overwrite the parameters before the message is sent.
            payload = pack_state(states.get(key, [])) + bytes(as_bytes(torch.cat(pieces)))
            self._connections.send(server, Kind.VALUE, payload, key=key, encoding=Encoding.DENSE)

    def _waits_in_vain(self, server: int) -> bool:
        """Return whether a server will probably never receive initial values, because no live worker has them.

        This is assumed if this worker replaces another worker, has no initial values, and has waited for longer than
        the time-out.
        """
        now = self._connections.liveness.now
        since = self._unready.setdefault(server, now)
        return self._replaces and self._kept is None and now - since > self._specification.timeout
