"""The pulls of a worker: what it waits for, and where it is written."""

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
    """Asks for the parameters, in the order in which they were used last time, and writes what comes into them.

    Args:
        copies: Further tensors, one for each parameter, that the same is written to.
        changes: Whether what comes may be changes of what came before.

    Attributes:
        step: The one that was last asked for.
        pending: The slices that have not come, in the order in which they are needed.
        refreshing: Whether what was last asked for are the present values, not those after an own push.
        states: The optimizer's state of the slices that have come, where that was last asked for; else None.
        encoding: In which values after an own push are asked for; `NOTHING` for that of the specification.
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
        self._had = Had(slices) if changes else None
        self._connections = connections
        self._question = 0  # number of the last one for the present values
        self._left = [0] * len(parameters)
        self._order: list[int] = list(range(len(parameters)))
        self._used: dict[int, None] = {}

    def waits_for(self, index: int) -> bool:
        """Whether a parameter is not up to date."""
        return self._left[index] > 0

    def use(self, index: int) -> None:
        """Note that a parameter is the next that is needed."""
        self._used.setdefault(index)

    def reorder(self) -> None:
        """A step is over: from now on ask in the order of its uses, if it has used all parameters."""
        if len(self._used) == len(self._by_parameter):
            self._order = list(self._used)
        self._used = {}

    def request(self, step: int, refresh: bool, states: bool = False) -> None:
        """Ask for all parameters, of the step that will be worked on next or, to refresh, as they are now.

        Or for the present `states` of their optimizer, which leaves the parameters as they are.
        """
        keys = list(dict.fromkeys(key for index in self._order for key in self._by_parameter[index]))
        self.refreshing = refresh
        self.states = {} if states else None
        if refresh:
            self._question = self._question % MOST_QUESTIONS + 1
        self.step = step
        self.pending = dict.fromkeys(keys)
        self._left = [len(own) for own in self._by_parameter]
        self._send(keys)

    def begin(self, step: int) -> None:
        """Where pushes ask for their answers: those that follow ask for the parameters of the next step."""
        self.refreshing, self.states = False, None
        self.step = step

    def with_push(self, key: int) -> None:
        """A slice's push asks for its answer, too."""
        if key not in self.pending:
            self.pending[key] = None
            for part in self._slices[key].parts:
                self._left[part.parameter] += 1

    def send_again(self, keys: Collection[int]) -> None:
        """Ask again for those of some slices that have not come."""
        wanted = set(keys)
        pulls = [key for key in self.pending if key in wanted]
        if pulls:
            self._send(pulls)

    def take(self, header: Header, payload: memoryview) -> bool:
        """Write a slice that has come; whether it was waited for."""
        if header.key not in self.pending or header.step != self.step:
            return False
        if header.question != (self._question if self.refreshing else 0):
            return False  # A question that was asked twice is answered twice, and the second answer may come late.
        slice_ = self._slices[header.key]
        if self.states is not None:
            self.states[header.key] = unpack_state(payload, slice_)
            del self.pending[header.key]
            for part in slice_.parts:
                self._left[part.parameter] -= 1
            return True
        check_length(len(payload), header.encoding, slice_.numel, slice_.dtype)
        values = decode(payload, header.encoding, slice_.numel, slice_.dtype)
        if self._had is not None and not self.refreshing:
            known = self._had.take(header, values)
            if known is None:
                return False
            values = known
        del self.pending[header.key]
        for part, own in zip(slice_.parts, values.split_with_sizes(slice_.sizes), strict=True):
            self._left[part.parameter] -= 1
            self._targets[part.parameter].write(part.start, own)
            if self._copies:
                self._copies[part.parameter].write(part.start, own)
            if not self._left[part.parameter]:
                self._targets[part.parameter].finish()
        return True

    def _send(self, keys: Sequence[int]) -> None:
        by_server: dict[int, list[int]] = {server.id: [] for server in self._connections.view.servers}
        for key in keys:
            by_server.setdefault(self._connections.primary(key), []).append(key)
        # Lowest bit: the present values. Above it: the encoding.
        asked = 1 if self.refreshing else self.encoding << 1
        for server, own in by_server.items():
            parts = {0.0: own} if self._had is None else self._had.by_mark(own, self.step - 1)
            for mark, part in parts.items():
                self._connections.send(
                    server, Kind.PULL, pack_keys(part), step=self.step, base=asked, weight=mark,
                    encoding=Encoding.KEYS, question=self._question if self.refreshing else 0,
                    level=int(self.states is not None),
                )  # fmt: skip


class Had:
    """What has come of slices that may come as changes, from which their values were put together.

    The parameters themselves do not do for that: now and then they are the servers' own, with what changes left out.
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._values = [torch.empty(0, dtype=slice_.dtype) for slice_ in slices]
        self._versions = [-1] * len(slices)
        self._marks = [0.0] * len(slices)

    def by_mark(self, keys: Sequence[int], version: int) -> dict[float, list[int]]:
        """Slices by what to tell a server of what is here of a version; 0 where that is another."""
        parts: dict[float, list[int]] = {}
        for key in keys:
            parts.setdefault(self._marks[key] if self._versions[key] == version else 0.0, []).append(key)
        return parts or {0.0: []}

    def take(self, header: Header, values: Tensor) -> Tensor | None:
        """A slice's values after an answer; None if it is a change of something else."""
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
    """Where a parameter's pulled values are written: its own memory, or a buffer if that is not flat CPU memory."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter.detach()
        self._direct = parameter.device.type == "cpu" and parameter.is_contiguous()
        buffer = self._parameter if self._direct else torch.empty(parameter.shape, dtype=parameter.dtype)
        self._flat = buffer.view(-1)

    def write(self, start: int, values: Tensor) -> None:
        """Write a slice."""
        self._flat[start : start + values.numel()].copy_(values)

    def finish(self) -> None:
        """All slices are written."""
        if not self._direct:
            self._parameter.copy_(self._flat.view(self._parameter.shape))
