"""First values and the optimizer's state, from a worker to the servers and back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.messages import Encoding, Header, Kind, unpack_json
from cnnstrategies.paramserver.optimizer_state import cut_state, pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import StateValue
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.connections import Connections


class InitialValues:
    """The first values of the slices and their part of the optimizer's state, for the servers that hold them.

    Args:
        connections: The connections to the servers.
        specification: What all processes of the run agree on.
        slices: All slices.
        parameters: The parameters in the specification's order.
        optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters; None for no state.
    """

    def __init__(
        self,
        connections: Connections,
        specification: Specification,
        slices: Sequence[Slice],
        parameters: Sequence[Tensor],
        optimizer_state: Mapping[str, Any] | None,
    ) -> None:
        self._connections = connections
        self._slices = slices
        self._parameters = parameters
        self._states = {} if optimizer_state is None else cut_state(specification, slices, optimizer_state)

    def send(self, server: int) -> None:
        """Send a server its slices' values, each after its state; what it has already, it ignores."""
        for slice_ in self._slices:
            if server not in slice_.servers:
                continue
            values = [
                self._parameters[part.parameter].detach().cpu().reshape(-1)[part.start : part.stop]
                for part in slice_.parts
            ]
            state = self._states.get(slice_.key, {})
            for name, part in state.items():
                described, raw = pack_state(name, part)
                self._connections.send(server, Kind.STATE, raw, key=slice_.key, json=described)
            # A copy: the values are pulled into the same memory, maybe before they have left.
            payload = bytes(as_bytes(torch.cat(values)))
            self._connections.send(
                server, Kind.VALUE, payload, key=slice_.key, base=len(state), encoding=Encoding.DENSE
            )


class StateReceipt:
    """The optimizer's state as it comes from the servers.

    Attributes:
        states: What has come, by slice.
    """

    def __init__(self, slices: Iterable[Slice]) -> None:
        self.states: dict[int, dict[str, StateValue]] = {slice_.key: {} for slice_ in slices}
        self._requests: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def begin(self, server: int, request: int) -> None:
        """A server was asked, maybe again, by a message with a number: what comes for an older one does not count."""
        self._requests[server] = request
        self._counts.pop(server, None)
        self._received[server] = 0

    def asked(self, server: int) -> float:
        """Number of the message that has asked a server; infinite if none has."""
        return self._requests.get(server, float("inf"))

    def has(self, server: int) -> bool:
        """Whether as many parts have come from a server as it has announced."""
        return self._counts.get(server, -1) == self._received.get(server)

    @property
    def complete(self) -> bool:
        """Whether everything has come from all servers that were asked."""
        return all(self.has(server) for server in self._requests)

    def take(self, server: int, header: Header, payload: memoryview) -> None:
        """Keep a part, or note how many a server has."""
        if self._requests.get(server) != header.step:
            return
        if header.meta:
            name, value = unpack_state(unpack_json(payload, header), payload[header.meta :])
            self.states[header.key][name] = value
            self._received[server] += 1
        else:
            self._counts[server] = header.base
