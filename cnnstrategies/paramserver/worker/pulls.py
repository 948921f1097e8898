"""A worker's pulls: the slices that it waits for, and the memory into which they are written."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import PAYLOADS, check_length, decode
from cnnstrategies.paramserver.messages import ALONE, Encoding, Header, Kind, pack_keys
from cnnstrategies.paramserver.optimizer_state import SliceState, unpack_state
from cnnstrategies.paramserver.slicing import Slice, keys_by_parameter
from cnnstrategies.paramserver.worker.connections import Connections

MOST_QUESTIONS = (1 << 32) - 1


class Pulls:
    """Requests for the parameters, in the order of their last use, and the writing of the answers into the parameters.

    Args:
        slices: All slices.
        parameters: The parameters, into which pulled values are written.
        connections: Connections to the servers.
        copies: Further tensors, one for each parameter, into which the same values are written.
        changes: Whether answers may be changes of the values that arrived before.

    Attributes:
        step: The step whose parameters were requested last.
        pending: Keys of the slices that have not arrived, in the order in which they are needed.
        refreshing: Whether the last request was for the present values, and not for values that contain this worker's
            last push.
        states: Optimizer's states that have arrived, by key, if the last request was for them; None otherwise.
        encoding: Encoding in which values after a push are requested; `NOTHING` for the specification's encoding.
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
        self._question = 0  # number of the last request for the present values
        self._left = [0] * len(parameters)  # number of each parameter's slices that have not arrived
        self._order: list[int] = list(range(len(parameters)))
        self._used: dict[int, None] = {}  # parameters in the order of their use in this step

    def waits_for(self, index: int) -> bool:
        """Return whether a parameter is not up to date."""
        return self._left[index] > 0

    def use(self, index: int) -> None:
        """Note that a parameter is the next one that is needed."""
        self._used.setdefault(index)

    def reorder(self) -> None:
        """End a step: later requests follow the order in which the step used the parameters, if it used all of them."""
        if len(self._used) == len(self._by_parameter):
            self._order = list(self._used)
        self._used = {}

    def request(self, step: int, refresh: bool, states: bool = False) -> None:
        """Request all parameters.

        Args:
            step: The step that will be worked on next.
            refresh: Request the present values, and not the values that `step` begins with.
            states: Request the optimizer's states instead, which leaves the parameters as they are.
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
        """Begin a step whose pushes request their answers: they request the parameters of step `step`."""
        self.refreshing, self.states = False, None
        self.step = step

    def with_push(self, key: int) -> None:
        """Note that a slice's push also requests its answer."""
        if key not in self.pending:
            self.pending[key] = None
            for part in self._slices[key].parts:
                self._left[part.parameter] += 1

    def send_again(self, keys: Collection[int]) -> None:
        """Repeat the requests for those of some slices that have not arrived."""
        wanted = set(keys)
        pulls = [key for key in self.pending if key in wanted]
        if pulls:
            self._send(pulls)

    def take(self, header: Header, payload: memoryview) -> bool:
        """Write a slice that has arrived into its parameters, and return whether it was waited for.

        Raises:
            InvalidMessageError: The payload does not fit the slice.
        """
        if header.key not in self.pending or header.step != self.step:
            return False
        if header.question != (self._question if self.refreshing else 0):
            return False  # A request that was sent twice is answered twice; the second answer may arrive late.
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
        # The lowest bit requests the present values; the bits above it are the encoding.
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
    """Values of slices that are pulled as changes: the sum of all changes so far.

    The parameters cannot serve as this sum: now and then they hold the servers' own values, which contain the
    remainders that the changes have left out.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._values = [torch.empty(0, dtype=slice_.dtype) for slice_ in slices]
        self._versions = [-1] * len(slices)
        self._marks = [0.0] * len(slices)

    def by_mark(self, keys: Sequence[int], version: int) -> dict[float, list[int]]:
        """Return slices by the mark of the values that this worker has; mark 0 if they are not of this version."""
        marked: dict[float, list[int]] = {}
        for key in keys:
            marked.setdefault(self._marks[key] if self._versions[key] == version else 0.0, []).append(key)
        return marked or {0.0: []}

    def take(self, header: Header, values: Tensor) -> Tensor | None:
        """Return a slice's values after an answer; None if the answer is a change of other values than these."""
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
    """Memory for a parameter's pulled values: its own memory, or a buffer if that is not flat CPU memory."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter.detach()
        self._direct = parameter.device.type == "cpu" and parameter.is_contiguous()
        buffer = self._parameter if self._direct else torch.empty(parameter.shape, dtype=parameter.dtype)
        self._flat = buffer.view(-1)

    def write(self, start: int, values: Tensor) -> None:
        """Write a slice of the values, beginning at element `start`."""
        self._flat[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """Copy the buffer, if there is one, into the parameter, when all slices are written."""
        if not self._direct:
            self._parameter.copy_(self._flat.view(self._parameter.shape))
