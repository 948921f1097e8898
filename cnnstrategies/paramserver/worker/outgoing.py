"""The pushes of a worker's step."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import Encoder, PayloadCompression, payload_compression
from cnnstrategies.paramserver.messages import Encoding, Kind
from cnnstrategies.paramserver.slicing import Slice, keys_by_parameter
from cnnstrategies.paramserver.specification import PushCompression, Specification, check_before_sending
from cnnstrategies.paramserver.worker.connections import Connections, Counters
from cnnstrategies.paramserver.worker.pulls import Pulls


class Outgoing:
    """Sends a step's pushes, and keeps each until it is answered, so that it can be sent again.

    Where every gradient is an update of its own, it is clipped here.

    Args:
        began_with: In mode ``local`` the parameters' values before the worker's own steps.
        answers: Where each push asks for its answer: what waits for that.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        connections: Connections,
        counters: Counters,
        began_with: Sequence[Tensor] = (),
        answers: Pulls | None = None,
    ) -> None:
        self.unanswered: dict[int, tuple[Any, int, int]] = {}
        self.options = [group.options for group in specification.groups]
        self._specification = specification
        self._slices = slices
        self._by_parameter = keys_by_parameter(slices, len(specification.parameters))
        self._encoders = [Encoder(specification.compression, specification.topk_density) for _ in slices]
        self._connections = connections
        self._counters = counters
        self._began_with = began_with
        self._answers = answers
        self._begin: tuple[int, dict[str, Any], float] | None = None
        self._pulls, self._level = int(Encoding.NOTHING), 0
        self._sent: set[int] = set()  # slices
        self._filling: dict[int, Filling] = {}
        self._clipped: dict[int, Tensor] = {}

    def encode_as(self, compression: PushCompression, pulls: int, level: int) -> None:
        """Encode the next gradients in this way; those that are on their way stay as they are.

        `pulls` says how what comes of the step will be pulled, `rung` what the header says of that.
        """
        self._pulls, self._level = pulls, level
        for encoder in self._encoders:
            encoder.compression = payload_compression(compression)

    def begin(self, step: int, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start a step's pushes; see :meth:`~cnnstrategies.paramserver.api.Worker.begin_step`."""
        check_before_sending(groups, self._specification.groups, step)
        if not (math.isfinite(samples) and samples >= 0):
            raise ConfigurationError(f"step {step}: samples={samples}: the weight of a gradient is a number from 0 on")
        self.options = [
            {name: values[name] for name in group.options}
            for group, values in zip(self._specification.groups, groups, strict=True)
        ]
        self._begin = step, {"options": self.options}, float(samples)
        self.unanswered.clear()
        self._sent.clear()
        self._filling.clear()
        for server in self._connections.view.servers:
            self._send_begin(server.id)

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, or keep it until the norm of all is known; in mode ``local`` its difference."""
        assert self._begin is not None, "push before begin_step"
        flat = gradient.detach().to("cpu").contiguous().view(-1)
        if self._began_with:
            # Of the sign of a gradient. A tensor of its own: new values come while it may still be on its way.
            flat = self._began_with[index].view(-1) - flat
        if not self._specification.aggregates:
            if self._specification.clip_norm is not None:
                self._clipped[index] = flat
                return
            if self._specification.clip_value is not None:
                flat = flat.clamp(-self._specification.clip_value, self._specification.clip_value)
        self._encode(index, flat)

    def finish(self) -> None:
        """Send what was kept, and that the other parameters have no gradient."""
        if self._clipped:
            gradients = list(self._clipped.values())
            norm = torch.nn.utils.get_total_norm(gradients)
            assert self._specification.clip_norm is not None
            factor = torch.clamp(self._specification.clip_norm / (norm + 1e-6), max=1.0)
            for index, gradient in self._clipped.items():
                self._encode(index, gradient * factor)
            self._clipped.clear()
        for key, filling in self._filling.items():
            self._encode_slice(key, filling.values, filling.absent)
        self._filling.clear()
        for slice_ in self._slices:
            if slice_.key not in self._sent:
                self.unanswered[slice_.key] = b"", Encoding.NOTHING, 0
                self._send(slice_.key)

    def send_again(self, keys: Collection[int], step: int) -> None:
        """Send the pushes of some slices that have not been answered; `step` is or will be worked on next."""
        self.begin_again([server.id for server in self._connections.view.servers], step)
        for key in [key for key in keys if key in self.unanswered]:
            self._send(key)

    def begin_again(self, servers: Iterable[int], step: int) -> None:
        """Tell some servers again what comes before the pushes of the present step, if there are or will be some."""
        # Also in the middle of a step that has pushed nothing yet: a new server must hear of it.
        if self._begin is not None and (self.unanswered or self._begin[0] == step):
            for server in servers:
                self._send_begin(server)

    def _encode(self, index: int, flat: Tensor) -> None:
        for key in self._by_parameter[index]:
            slice_ = self._slices[key]
            if len(slice_.parts) > 1:
                if key not in self._filling:
                    self._filling[key] = Filling(slice_)
                filling = self._filling[key]
                filling.put(index, flat)
                if not filling.absent:
                    self._encode_slice(key, filling.values)
                    del self._filling[key]
                continue
            (part,) = slice_.parts
            self._encode_slice(key, flat if part.numel == flat.numel() else flat[part.start : part.stop])

    def _encode_slice(self, key: int, values: Tensor, absent: int = 0) -> None:
        encoder = self._encoders[key]
        if encoder.compression.largest < math.inf:
            assert self._begin is not None
            check_range(encoder.compression, self._slices[key], values, self._specification, self._begin[0])
        self.unanswered[key] = encoder.encode(values), encoder.compression.encoding, absent
        self._send(key)

    def _send_begin(self, server: int) -> None:
        assert self._begin is not None
        step, values, samples = self._begin
        self._connections.send(
            server, Kind.BEGIN, step=step, base=self._pulls, level=self._level, weight=samples, json=values
        )

    def _send(self, key: int) -> None:
        assert self._begin is not None
        self._sent.add(key)
        payload, encoding, absent = self.unanswered[key]
        if self._answers is not None:
            self._answers.with_push(key)
        self._counters.bytes_sent += self._connections.send(
            self._connections.primary(key), Kind.PUSH, payload, key=key, step=self._begin[0], encoding=encoding,
            base=absent,
        )  # fmt: skip


def check_range(
    compression: PayloadCompression, slice_: Slice, values: Tensor, specification: Specification, step: int
) -> None:
    """Refuse finite gradients that the compression cannot hold. Infinite and NaN gradients are sent as they are.

    Raises:
        ConfigurationError: A gradient is too large; the message names its parameter.
    """
    low, high = (float(bound) for bound in values.aminmax())
    if not compression.largest < max(-low, high) < math.inf:
        return
    for part, view in zip(slice_.parts, slice_.views(values), strict=True):
        largest = float(view.abs().max())
        if largest > compression.largest:
            raise ConfigurationError(
                f"step {step}: what is sent of {specification.parameters[part.parameter].name} is as large as "
                f"{largest:.3g}, and {compression.name} holds {compression.largest:g} at most: use compression: bf16, "
                "which has the range of float32"
            )


class Filling:
    """The gradients of the small parameters that share a slice, as they come.

    Attributes:
        values: Theirs, in memory of their own: what was pushed last may still be on its way.
        absent: The parts that have not come, as bits.
    """

    def __init__(self, slice_: Slice) -> None:
        self.values = torch.zeros(slice_.numel, dtype=slice_.dtype)
        self.absent = (1 << len(slice_.parts)) - 1
        views = slice_.views(self.values)
        self._parts = {part.parameter: (place, views[place]) for place, part in enumerate(slice_.parts)}

    def put(self, parameter: int, gradient: Tensor) -> None:
        """One has come."""
        place, part = self._parts[parameter]
        part.copy_(gradient)
        self.absent &= ~(1 << place)
