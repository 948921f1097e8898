"""The pushes of a worker's current step: clipping, encoding, sending, and sending again."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import Encoder, PayloadCompression, payload_compression
from cnnstrategies.paramserver.messages import Encoding, Kind
from cnnstrategies.paramserver.optimizers import check_before_sending, sent_options
from cnnstrategies.paramserver.slicing import Slice, keys_by_parameter
from cnnstrategies.paramserver.specification import PushCompression, Specification
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.paramserver.worker.pulls import Pulls


class Outgoing:
    """A worker's pushes of the current step. Each push is kept until the server replies, so that it can be sent again.

    In modes without common steps (``async``, and ``ssp`` with a staleness above 0), this class also clips the
    gradients.

    Args:
        specification: The run's specification.
        slices: All slices.
        connections: Connections to the servers.
        counters: Counters of this worker.
        began_with: In mode ``local``, the parameters' values before the worker's own optimizer steps; otherwise empty.
        answers: This worker's pulls, if each push also requests the slice's new values; otherwise None.

    Attributes:
        unanswered: The pushes that have no reply yet. Keys: keys of slices. Values: the payload, the number of its
            encoding, and an integer in which bit i is set if part i of the slice has no gradient.
        began_with: In mode ``local``, the parameters' values before the worker's own optimizer steps; otherwise empty.
        options: Hyperparameters of the current step, one dictionary for each parameter group.
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
        # In common steps the servers clip the mean gradient; otherwise each worker clips its own gradients.
        self._clip_norm = None if specification.aggregates else specification.clip_norm
        self._clip_value = None if specification.aggregates else specification.clip_value
        self._connections = connections
        self._counters = counters
        self.began_with = began_with
        self._answers = answers
        # Number, hyperparameters and number of samples of the last begun step; None before the first step.
        self._begin: tuple[int, dict[str, Any], float] | None = None
        self._pulls, self._level = int(Encoding.NOTHING), 0
        self._sent: set[int] = set()  # keys of the slices that were pushed in this step
        self._filling: dict[int, Filling] = {}
        # By parameter index: gradients that are kept until the norm of all gradients is known.
        self._unclipped: dict[int, Tensor] = {}

    def encode_as(self, compression: PushCompression, pulls: int, level: int) -> None:
        """Set the compressions that are used from the next step on.

        A push that is sent again keeps the encoding with which it was sent first.

        Args:
            compression: Compression of the gradients.
            pulls: Number of the encoding in which the new values will be pulled after a step.
            level: Value of the field `level` in the header of BEGIN messages; see :class:`.Header`.
        """
        self._pulls, self._level = pulls, level
        for encoder in self._encoders:
            encoder.compression = payload_compression(compression)

    def begin(self, step: int, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Begin a step, and tell all servers. The gradients that are pushed from now on belong to this step.

        Args:
            step: Number of the step.
            groups: Hyperparameters of each parameter group.
            samples: Number of samples of the worker's batch.

        Raises:
            ConfigurationError: A hyperparameter or `samples` is not valid.
        """
        check_before_sending(groups, self._specification.groups, step)
        if not (math.isfinite(samples) and samples >= 0):
            raise ConfigurationError(
                f"step {step}: samples={samples} is not allowed; pass a finite number of at least 0"
            )
        self.options = sent_options(groups, self._specification.groups)
        self._begin = step, {"options": self.options}, float(samples)
        self.unanswered.clear()
        self._sent.clear()
        self._filling.clear()
        for server in self._connections.view.servers:
            self._send_begin(server.id)

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, or keep it until the norm of all gradients is known.

        In mode ``local``, the caller passes the parameter's current value as `gradient`. This method then sends a
        difference: the parameter's value before the worker's own steps minus the current value.
        """
        assert self._begin is not None, "push before begin_step"
        flat = gradient.detach().to("cpu").contiguous().view(-1)
        if self.began_with:
            # The servers subtract a gradient from the values, so the difference is the old value minus the new value.
            # The difference must be a new tensor: pulled values may overwrite `began_with` before the message is sent.
            flat = self.began_with[index].view(-1) - flat
        if self._clip_norm is not None:
            self._unclipped[index] = flat
            return
        if self._clip_value is not None:
            flat = flat.clamp(-self._clip_value, self._clip_value)
        self._encode(index, flat)

    def finish(self) -> None:
        """Finish the pushes of the step: send the gradients that were kept until now, clipped by their norm if needed.

        Also tell the servers which parameters have no gradient in this step.
        """
        if self._unclipped:
            gradients = list(self._unclipped.values())
            norm = torch.nn.utils.get_total_norm(gradients)
            assert self._clip_norm is not None
            factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
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
        """Send again the BEGIN message to all servers, and then the given slices' pushes that have no reply yet.

        Args:
            keys: Keys of the slices.
            step: The step that the worker works on, or will work on next; see :meth:`begin_again`.
        """
        self.begin_again([server.id for server in self._connections.view.servers], step)
        for key in [key for key in keys if key in self.unanswered]:
            self._send(key)

    def begin_again(self, servers: Iterable[int], step: int) -> None:
        """Send the BEGIN message of the last begun step again, unless this step has ended and all pushes have a reply.

        Args:
            servers: Ids of the servers to which the message is sent.
            step: The step that the worker works on, or will work on next.
        """
        # At the start of a step, `unanswered` is empty, because nothing was pushed yet. But a new server must learn
        # that the step has begun, so BEGIN is also sent if the second condition holds.
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
            self._encode_slice(key, flat if slice_.numel == flat.numel() else flat[part.start : part.stop])

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
            self._answers.expect_after_push(key)
        self._counters.bytes_sent += self._connections.send(
            self._connections.primary(key), Kind.PUSH, payload, key=key, step=self._begin[0], encoding=encoding,
            base=absent,
        )  # fmt: skip


def check_range(
    compression: PayloadCompression, slice_: Slice, values: Tensor, specification: Specification, step: int
) -> None:
    """Check that a slice's gradients are in the compression's range. If a gradient is infinite or NaN, do not check.

    Args:
        compression: Compression with which the gradients will be encoded.
        slice_: The slice.
        values: The slice's gradients, flat. In mode ``local`` these are differences of parameters.
        specification: The run's specification.
        step: Number of the step, for the error message.

    Raises:
        ConfigurationError: A gradient is too large; the error message names its parameter.
    """
    low, high = (float(bound) for bound in values.aminmax())
    if not compression.largest < max(-low, high) < math.inf:
        return
    for part, view in zip(slice_.parts, slice_.views(values), strict=True):
        largest = float(view.abs().max())
        if largest > compression.largest:
            raise ConfigurationError(
                f"step {step}: the gradient of {specification.parameters[part.parameter].name} contains the number "
                f"{largest:.3g}, but the largest number that `compression: {compression.name}` can send is "
                f"{compression.largest:g}; use `compression: bf16`, which has the range of float32"
            )


class Filling:
    """Buffer that collects the gradients of the small parameters in one slice.

    Attributes:
        values: The gradients, flat. Each step uses a new tensor, because the previous step's push may still be waiting
            to be sent.
        absent: Bits of the slice's parts: bit i is set while the gradient of part i is missing.
    """

    def __init__(self, slice_: Slice) -> None:
        self.values = torch.zeros(slice_.numel, dtype=slice_.dtype)
        self.absent = (1 << len(slice_.parts)) - 1
        views = slice_.views(self.values)
        self._parts = {part.parameter: (place, views[place]) for place, part in enumerate(slice_.parts)}

    def put(self, parameter: int, gradient: Tensor) -> None:
        """Copy a parameter's gradient into the buffer, and clear the parameter's bit in :attr:`absent`.

        Args:
            parameter: Index of the parameter.
            gradient: The gradient, flat.
        """
        place, part = self._parts[parameter]
        part.copy_(gradient)
        self.absent &= ~(1 << place)
