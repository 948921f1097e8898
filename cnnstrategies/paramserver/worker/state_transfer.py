"""First values and the optimizer's state, from a worker to the servers and back."""

from collections.abc import Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import as_bytes
from cnnstrategies.paramserver.messages import Encoding, Header, Kind, unpack_json
from cnnstrategies.paramserver.optimizer_state import pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import StateValue
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.worker.connections import Connections

States = Mapping[int, Mapping[str, StateValue]]
"""By slice."""


def send_first_values(
    connections: Connections, server: int, slices: Sequence[Slice], values: Sequence[Tensor], states: States
) -> None:
    """Send a server its slices of some parameters' values, each after its state; what it has already, it ignores."""
    for slice_ in slices:
        if server not in slice_.servers:
            continue
        own = [values[part.parameter].detach().cpu().reshape(-1)[part.start : part.stop] for part in slice_.parts]
        state = states.get(slice_.key, {})
        for name, value in state.items():
            described, raw = pack_state(name, value)
            connections.send(server, Kind.STATE, raw, key=slice_.key, json=described)
        # A copy: the values are pulled into the same memory, maybe before they have left.
        payload = bytes(as_bytes(torch.cat(own)))
        connections.send(server, Kind.VALUE, payload, key=slice_.key, base=len(state), encoding=Encoding.DENSE)


class StateReceipt:
    """The optimizer's state as it comes from the servers."""

    def __init__(self, slices: Sequence[Slice]) -> None:
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
        return self._requests.get(server, inf)

    def has(self, server: int) -> bool:
        """Whether as many entries have come from a server as it has announced."""
        return self._counts.get(server, -1) == self._received.get(server)

    @property
    def complete(self) -> bool:
        """Whether everything has come from all servers that were asked."""
        return all(self.has(server) for server in self._requests)

    def take(self, server: int, header: Header, payload: memoryview) -> None:
        """Keep an entry, or note how many a server has."""
        if self._requests.get(server) != header.step:
            return
        if header.meta:
            name, value = unpack_state(unpack_json(payload, header), payload[header.meta :])
            self.states[header.key][name] = value
            self._received[server] += 1
        else:
            self._counts[server] = header.base
