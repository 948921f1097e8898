"""A worker's pushes in a step."""

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
    """A worker's pushes of the present step; each is kept until it is answered, so that it can be sent again.

    In modes in which every gradient is an update, gradients are clipped here.

    Args:
        specification: The run's specification.
        slices: All slices.
        connections: Connections to the servers.
        counters: Counters of this worker.
        began_with: In mode ``local`` the parameters' values before the worker's own steps.
        answers: This worker's pulls, if each push also requests its answer.

    Attributes:
        unanswered: By key: payload, encoding and missing parts (as bits) of the pushes that have no answer yet.
        options: Hyper-parameters of the present step, one dictionary for each parameter group.
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
        self._sent: set[int] = set()  # keys of the slices that were pushed in this step
        self._filling: dict[int, Filling] = {}
        self._unclipped: dict[int, Tensor] = {}  # gradients that wait until the norm of all is known

    def encode_as(self, compression: PushCompression, pulls: int, level: int) -> None:
        """Encode the gradients from now on in this way; pushes that were sent already stay as they are.

        Args:
            compression: Compression of the gradients.
            pulls: Encoding in which the step's result will be pulled.
            level: Value of the header's field; see :class:`~cnnstrategies.paramserver.messages.Header`.
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
        """Send a parameter's gradient, or keep it until the norm of all gradients is known.

        In mode ``local`` the argument is the parameter's value, and the difference to its earlier value is sent.
        """
        assert self._begin is not None, "push before begin_step"
        flat = gradient.detach().to("cpu").contiguous().view(-1)
        if self._began_with:
            # The difference has a gradient's sign. It needs memory of its own: new values may arrive before it is sent.
            flat = self._began_with[index].view(-1) - flat
        if not self._specification.aggregates:
            if self._specification.clip_norm is not None:
                self._unclipped[index] = flat
                return
            if self._specification.clip_value is not None:
                flat = flat.clamp(-self._specification.clip_value, self._specification.clip_value)
        self._encode(index, flat)

    def finish(self) -> None:
        """Send the gradients that were kept, and tell the servers that the other parameters have no gradient."""
        if self._unclipped:
            gradients = list(self._unclipped.values())
            norm = torch.nn.utils.get_total_norm(gradients)
            assert self._specification.clip_norm is not None
            factor = torch.clamp(self._specification.clip_norm / (norm + 1e-6), max=1.0)
            for index, gradient in self._unclipped.items():
                self._encode(index, gradient * factor)
            self._unclipped.clear()
        for key, filling in self._filling.items():
            self._encode_slice(key, filling.values, filling.absent)
        self._filling.clear()
        for slice_ in self._slices:
            if slice_.key not in self._sent:
                self.unanswered[slice_.key] = b"", Encoding.NOTHING, 0
                self._send(slice_.key)

    def send_again(self, keys: Collection[int], step: int) -> None:
        """Send the unanswered pushes of some slices again; `step` is the step that is or will be worked on next."""
        self.begin_again([server.id for server in self._connections.view.servers], step)
        for key in [key for key in keys if key in self.unanswered]:
            self._send(key)

    def begin_again(self, servers: Iterable[int], step: int) -> None:
        """Send some servers the beginning of the present step again, if the step has pushes or will have some."""
        # This includes a step that has not pushed anything yet: a new server must learn that the step has begun.
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
    """Gradients of the small parameters that share a slice, while they are collected.

    Attributes:
        values: The gradients, in new memory for each step: the last step's push may still be on its way.
        absent: Parts of the slice that are still missing, as bits.
    """

    def __init__(self, slice_: Slice) -> None:
        self.values = torch.zeros(slice_.numel, dtype=slice_.dtype)
        self.absent = (1 << len(slice_.parts)) - 1
        views = slice_.views(self.values)
        self._parts = {part.parameter: (place, views[place]) for place, part in enumerate(slice_.parts)}

    def put(self, parameter: int, gradient: Tensor) -> None:
        """Add a parameter's gradient."""
        place, part = self._parts[parameter]
        part.copy_(gradient)
        self.absent &= ~(1 << place)
