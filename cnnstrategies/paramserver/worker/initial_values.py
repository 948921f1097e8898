"""The values with which a run begins, which a worker sends to the servers that have no values yet."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.messages import Encoding, Kind
from cnnstrategies.paramserver.optimizer_state import SliceState, cut_state, pack_state
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.connections import Connections


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

    def on_welcome(self, now: float, server: int, welcome: Mapping[str, Any]) -> None:
        """Send a server its initial values, if it has none and this worker is responsible.

        Args:
            now: The current time, in seconds.
            server: Id of the server.
            welcome: JSON object of the server's WELCOME message.

        Raises:
            ServersUnreachableError: The server has lost its values, or no live worker has initial values.
        """
        if welcome["ready"] is not False:
            self._unready.pop(server, None)
        elif self.outdated or welcome["lost"] or self._waits_in_vain(now, server):
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

    def _waits_in_vain(self, now: float, server: int) -> bool:
        """Return whether a server will probably never receive initial values, because no live worker has them.

        This is assumed if this worker replaces another worker, has no initial values, and has waited for longer than
        the time-out.
        """
        since = self._unready.setdefault(server, now)
        return self._replaces and self._kept is None and now - since > self._specification.timeout
