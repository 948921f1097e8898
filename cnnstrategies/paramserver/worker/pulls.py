"""A worker's pulls: requests for slices, and the writing of arrived values into the parameters."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import PAYLOADS, check_length, decode
from cnnstrategies.paramserver.messages import ALONE, Encoding, Header, Kind, pack_keys
from cnnstrategies.paramserver.optimizer_state import SliceState, unpack_state
from cnnstrategies.paramserver.slicing import Slice, keys_by_parameter
from cnnstrategies.paramserver.worker.connections import Connections

MOST_QUESTIONS = (1 << 32) - 1  # largest id of a request for the current values; the header has 32 bits for the id


class Pulls:
    """The worker's requests for parameters, and the writing of the servers' replies into the parameters.

    The parameters are requested in the order in which the last finished step used them.

    Args:
        slices: All slices.
        parameters: The parameters, into which pulled values are written.
        connections: Connections to the servers.
        copies: A second tensor for each parameter, into which pulled values are also written; empty for no copies.
        changes: Whether a reply may contain only the difference from the values in an earlier reply.

    Attributes:
        step: The step whose parameters were requested last.
        pending: Keys of the requested slices that have not arrived, in the order in which the worker needs the slices.
        refreshing: Whether the last request was for the current values. Otherwise the servers reply only when the
            values contain this worker's last push.
        states: By the slice's key: the slice's optimizer state, if the state has arrived. None if the last request was
            for values.
        encoding: Number of the encoding in which the values after a push are requested; `NOTHING` for the encoding that
            the specification names.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        parameters: Sequence[Tensor],
        connections: Connections,
        copies: Sequence[Tensor] = (),
        changes: bool = False,
    ) -> None:
        self.step = 0
        self.pending: dict[int, None] = {}
        self.refreshing = False
        self.states: dict[int, SliceState] | None = None
        self.encoding = int(Encoding.NOTHING)
        self._slices = slices
        self._by_parameter = keys_by_parameter(slices, len(parameters))
        self._targets = [PullTarget(parameter) for parameter in parameters]
        self._copies = [PullTarget(copy) for copy in copies]
        self._pulled_values = PulledValues(slices) if changes else None
        self._connections = connections
        self._question = 0  # id of the last request for the current values
        # By parameter index: number of the parameter's slices that have not arrived.
        self._left = [0] * len(parameters)
        self._order: list[int] = list(range(len(parameters)))
        # Indices of the parameters that the current step has used, in the order of their first use.
        self._used: dict[int, None] = {}

    def waits_for(self, index: int) -> bool:
        """Return whether the worker still waits for a slice of the parameter with this index."""
        return self._left[index] > 0

    def use(self, index: int) -> None:
        """Record that the current step uses the parameter with this index now, for :meth:`reorder`."""
        self._used.setdefault(index)

    def reorder(self) -> None:
        """From now on, request the parameters in the order in which the finished step used them.

        If the step did not use all parameters, the order of the requests does not change.
        """
        if len(self._used) == len(self._by_parameter):
            self._order = list(self._used)
        self._used = {}

    def request(self, step: int, refresh: bool, states: bool = False) -> None:
        """Request the values of all parameters, or the optimizer's state of all slices.

        Args:
            step: The step that the worker will work on next.
            refresh: Whether to request the current values instead of the values with which `step` begins.
            states: Whether to request the optimizer's state instead of values. The reply then does not change the
                parameters.
        """
        keys = list(dict.fromkeys(key for index in self._order for key in self._by_parameter[index]))
        self.refreshing = refresh
        self.states = {} if states else None
        if refresh:
            self._question = self._question % MOST_QUESTIONS + 1
        self.step = step
        self.pending = dict.fromkeys(keys)
        self._left = [len(slice_keys) for slice_keys in self._by_parameter]
        self._send(keys)

    def begin(self, step: int) -> None:
        """Begin a step in which each push also requests the slice's new values, so that no PULL message is needed.

        Args:
            step: The next step, which begins with the new values.
        """
        self.refreshing, self.states = False, None
        self.step = step

    def expect_after_push(self, key: int) -> None:
        """Record that the worker waits for a slice's new values. The worker's push of the slice requests the values."""
        if key not in self.pending:
            self.pending[key] = None
            for part in self._slices[key].parts:
                self._left[part.parameter] += 1

    def send_again(self, keys: Collection[int]) -> None:
        """Send the requests for the slices with these keys again, except for slices that have arrived."""
        wanted = set(keys)
        pulls = [key for key in self.pending if key in wanted]
        if pulls:
            self._send(pulls)

    def take(self, header: Header, payload: memoryview) -> bool:
        """Handle a server's reply to a pull: write the slice's values into the parameters.

        Returns:
            Whether the worker was waiting for this reply. Otherwise the reply is ignored.

        Raises:
            InvalidMessageError: The payload has the wrong size for the slice, or is not valid.
        """
        if header.key not in self.pending or header.step != self.step:
            return False
        if header.question != (self._question if self.refreshing else 0):
            return False  # This is a late reply to an earlier request, so ignore it.
        slice_ = self._slices[header.key]
        if self.states is not None:
            self.states[header.key] = unpack_state(payload, slice_)
            del self.pending[header.key]
            for part in slice_.parts:
                self._left[part.parameter] -= 1
            return True
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        values = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        if self._pulled_values is not None and not self.refreshing:
            whole = self._pulled_values.take(header, values)
            if whole is None:
                return False
            values = whole
        del self.pending[header.key]
        for part, part_values in zip(slice_.parts, values.split_with_sizes(slice_.sizes), strict=True):
            self._left[part.parameter] -= 1
            self._targets[part.parameter].write(part.start, part_values)
            if self._copies:
                self._copies[part.parameter].write(part.start, part_values)
            if not self._left[part.parameter]:
                self._targets[part.parameter].finish()
        return True

    def _send(self, keys: Sequence[int]) -> None:
        by_server: dict[int, list[int]] = {server.id: [] for server in self._connections.view.servers}
        for key in keys:
            by_server.setdefault(self._connections.primary(key), []).append(key)
        # Bit 0 of `base` requests the current values. The higher bits contain the number of the requested encoding.
        base = 1 if self.refreshing else self.encoding << 1
        for server, server_keys in by_server.items():
            if self._pulled_values is None:
                by_mark = {0.0: server_keys}
            else:
                by_mark = self._pulled_values.by_mark(server_keys, self.step - 1)
            for mark, marked_keys in by_mark.items():
                self._connections.send(
                    server, Kind.PULL, pack_keys(marked_keys), step=self.step, base=base, weight=mark,
                    encoding=Encoding.KEYS, question=self._question if self.refreshing else 0,
                    level=int(self.states is not None),
                )  # fmt: skip


class PulledValues:
    """Base values of slices: the values to which the worker adds the differences in the replies to its pulls.

    The differences are compressed. Each difference leaves out a remainder, which the server adds to a later difference.
    The parameters themselves cannot serve as base values: after a request for the current values, the parameters
    contain the servers' exact values, which include the remainder.

    Each slice's base values have a version, and an id that the server has chosen, the mark; see
    :class:`~cnnstrategies.paramserver.messages.Header`.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._values = [torch.empty(0, dtype=slice_.dtype) for slice_ in slices]
        self._versions = [-1] * len(slices)
        self._marks = [0.0] * len(slices)

    def by_mark(self, keys: Sequence[int], version: int) -> dict[float, list[int]]:
        """Group the keys of slices by the mark of the slices' base values. A mark is an id that the server has chosen.

        Args:
            keys: Keys of the slices.
            version: The version that the base values must have.

        Returns:
            Keys: marks. Values: keys of slices. A slice whose base values have a different version is under mark 0.
        """
        marked: dict[float, list[int]] = {}
        for key in keys:
            marked.setdefault(self._marks[key] if self._versions[key] == version else 0.0, []).append(key)
        return marked or {0.0: []}

    def take(self, header: Header, values: Tensor) -> Tensor | None:
        """Return a slice's new values after a reply to a pull.

        If the reply is a difference, add it to the base values. Return None if this worker does not have the base
        values to which the difference belongs.

        Args:
            header: Header of the reply.
            values: The values or the difference in the reply.
        """
        key = header.key
        if not PAYLOADS[header.encoding].lossy:
            if header.weight == ALONE:
                self._versions[key] = -1
                return values
            self._values[key] = values.clone()
        elif (header.base, header.weight) == (self._versions[key] + 1, self._marks[key]):
            self._values[key].add_(values)
        else:
            return None
        self._versions[key], self._marks[key] = header.base, header.weight
        return self._values[key]


class PullTarget:
    """Destination of a parameter's pulled values.

    A contiguous parameter on the CPU is written directly. Any other parameter is written through a buffer.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter.detach()
        self._direct = parameter.device.type == "cpu" and parameter.is_contiguous()
        buffer = self._parameter if self._direct else torch.empty(parameter.shape, dtype=parameter.dtype)
        self._flat = buffer.view(-1)

    def write(self, start: int, values: Tensor) -> None:
        """Write a part of the parameter's values, beginning at element `start` of the flat parameter."""
        self._flat[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """Copy the buffer into the parameter, if values were written through a buffer.

        Call this when all slices of the parameter are written.
        """
        if not self._direct:
            self._parameter.copy_(self._flat.view(self._parameter.shape))
