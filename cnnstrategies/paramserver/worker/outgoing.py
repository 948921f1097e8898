"""The pushes of a worker's step."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.compression import ENCODINGS, Encoder
from cnnstrategies.paramserver.counters import Counters
from cnnstrategies.paramserver.messages import Encoding, Kind
from cnnstrategies.paramserver.option_checks import check_before_sending
from cnnstrategies.paramserver.slicing import Slice, keys_by_parameter
from cnnstrategies.paramserver.specification import Compression, Specification
from cnnstrategies.paramserver.worker.connections import Connections
from cnnstrategies.paramserver.worker.momentum import MomentumCorrection, share
from cnnstrategies.paramserver.worker.placement import Placement


class Outgoing:
    """Sends a step's pushes, and keeps each until it is answered, so that it can be sent again.

    Where every gradient is an update of its own, it is clipped here.

    Args:
        specification: What all processes of the run agree on.
        slices: All slices.
        parameters: The parameters in the specification's order, with the values that gradients are computed with.
        connections: The connections to the servers.
        placement: The slices' primaries.
        counters: Its bytes sent are counted.
        began_with: In mode ``local`` the parameters' values before the worker's own steps.

    Attributes:
        options: The hyper-parameters of each parameter group, as last begun with.
    """

    def __init__(
        self,
        specification: Specification,
        slices: Sequence[Slice],
        parameters: Sequence[Tensor],
        connections: Connections,
        placement: Placement,
        counters: Counters,
        began_with: Sequence[Tensor] = (),
    ) -> None:
        self.options = [group.options for group in specification.groups]
        self._specification = specification
        self._slices = slices
        self._by_parameter = keys_by_parameter(slices, len(specification.parameters))
        self._encoders = [Encoder(specification.compression, specification.compression_ratio) for _ in slices]
        self._correction = MomentumCorrection(specification, slices, parameters)
        self._connections = connections
        self._placement = placement
        self._counters = counters
        self._began_with = began_with
        self._begin: tuple[int, dict[str, Any], float] | None = None
        self._unanswered: dict[int, tuple[Any, Encoding]] = {}
        self._pushed: set[int] = set()
        self._clipped: dict[int, Tensor] = {}

    @property
    def unanswered(self) -> bool:
        """Whether there are pushes that are not answered."""
        return bool(self._unanswered)

    def waits(self, key: int) -> bool:
        """Whether a slice's push is not answered."""
        return key in self._unanswered

    def open_among(self, keys: Collection[int]) -> bool:
        """Whether the pushes of some of these slices are not answered."""
        return any(key in self._unanswered for key in keys)

    def encode_as(self, compression: Compression) -> None:
        """Encode the gradients of the next step in this way; those that are on their way stay as they are."""
        for encoder in self._encoders:
            encoder.encoding = ENCODINGS[compression]

    def begin(self, step: int, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start a step's pushes; see :meth:`~cnnstrategies.paramserver.api.Worker.begin_step`."""
        check_before_sending(groups, self._specification.groups, step)
        if not (math.isfinite(samples) and samples >= 0):
            raise ConfigurationError(f"step {step}: samples={samples}: the weight of a gradient is a number from 0 on")
        self.options = [
            {name: values[name] for name in group.options}
            for group, values in zip(self._specification.groups, groups, strict=True)
        ]
        self._begin = step, {"options": self._correction.begin(self.options)}, float(samples)
        ratio = share(self._specification, step)
        for encoder in self._encoders:
            encoder.ratio = ratio
        self._unanswered.clear()
        self._pushed.clear()
        for server in self._connections.view.servers:
            self._send_begin(server.id)

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, or keep it until the norm of all is known; in mode ``local`` its difference."""
        assert self._begin is not None, "push before begin_step"
        self._pushed.add(index)
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
        for index, keys in enumerate(self._by_parameter):
            if index not in self._pushed:
                for key in keys:
                    self._unanswered[key] = b"", Encoding.NOTHING
                    self._send(key)

    def answered(self, key: int) -> None:
        """A slice was pulled with its push in it."""
        self._unanswered.pop(key, None)

    def send_again(self, keys: Collection[int], step: int) -> None:
        """Send the pushes of some slices that have not been answered.

        Args:
            keys: The slices.
            step: The step that is or will be worked on next.
        """
        self.begin_again([server.id for server in self._connections.view.servers], step)
        for key in [key for key in keys if key in self._unanswered]:
            self._send(key)

    def begin_again(self, servers: Iterable[int], step: int) -> None:
        """Tell some servers again what comes before the pushes, if there are or will be some.

        Args:
            servers: Their ids.
            step: The step that is or will be worked on next.
        """
        # Also in the middle of a step that has pushed nothing yet: a new server must hear of it.
        if self._begin is not None and (self._unanswered or self._begin[0] == step):
            for server in servers:
                self._send_begin(server)

    def _encode(self, index: int, flat: Tensor) -> None:
        for key in self._by_parameter[index]:
            slice_, encoder = self._slices[key], self._encoders[key]
            part = flat if slice_.numel == flat.numel() else flat[slice_.start : slice_.stop]
            self._unanswered[key] = self._correction.encode(encoder, slice_, part), encoder.encoding
            self._send(key)

    def _send_begin(self, server: int) -> None:
        assert self._begin is not None
        step, values, samples = self._begin
        self._connections.send(server, Kind.BEGIN, step=step, weight=samples, json=values)

    def _send(self, key: int) -> None:
        assert self._begin is not None
        payload, encoding = self._unanswered[key]
        self._counters.bytes_sent += self._connections.send(
            self._placement.primary(key), Kind.PUSH, payload, key=key, step=self._begin[0], encoding=encoding
        )
