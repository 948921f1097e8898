"""Momentum that is made before anything is left out: Lin et al., "Deep Gradient Compression" (ICLR 2018).

Error feedback alone hands over old gradients in a lump, to which the servers' momentum then does what it would do to a
new one. With momentum correction each worker makes the velocity of its own gradients, what is left out of a push are
parts of velocities, and the servers add what comes by SGD without momentum. What top-k sends is late, and its velocity
points where the weights were: momentum factor masking forgets it. Where a whole slice is sent nothing is late, and
nothing is masked, as in the authors' program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.compression import Encoder, indices_in
from cnnstrategies.paramserver.correction_checks import FIRST_SHARE
from cnnstrategies.paramserver.messages import Encoding
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Specification


def share(specification: Specification, step: int) -> float:
    """The share of the elements that top-k sends in a step: it falls exponentially while it warms up (section 3.3).

    Args:
        specification: Of the run.
        step: Counted from the start of the run.
    """
    ratio, steps = specification.compression_ratio, specification.compression_warmup
    made = specification.steps_before + step
    return ratio if made >= steps else FIRST_SHARE * (ratio / FIRST_SHARE) ** (made / steps)


class MomentumCorrection:
    """The velocities of a worker's gradients, if the specification wants them to be made here.

    A worker that takes another's place, or comes from a checkpoint, begins without velocity.

    Args:
        specification: What all processes of the run agree on.
        slices: All slices.
        parameters: The parameters in the specification's order, with the values that gradients are computed with.
    """

    def __init__(self, specification: Specification, slices: Sequence[Slice], parameters: Sequence[Tensor]) -> None:
        self._group = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
        self._velocities: list[Velocity] = []
        if specification.momentum_correction:
            # It leaves something out: no slice is shared.
            parts = [slice_.parts[0] for slice_ in slices]
            self._velocities = [Velocity(parameters[part.parameter], part.start, part.stop) for part in parts]
        self._options: Sequence[Mapping[str, Any]] = ()

    def begin(self, options: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Take each parameter group's hyper-parameters of a step; those that the servers make theirs with.

        Without momentum ``nesterov`` has no effect, so that it can stay as it is.
        """
        self._options = options
        if not self._velocities:
            return options
        return [{**group, "momentum": 0.0, "weight_decay": 0.0} for group in options]

    def encode(self, encoder: Encoder, slice_: Slice, gradient: Tensor) -> Any:
        """The payload for a slice's gradient, flat: of the gradient itself, or of the velocity that comes of it."""
        if not self._velocities:
            return encoder.encode(gradient)
        velocity = self._velocities[slice_.key]
        payload = encoder.encode(velocity.add(gradient, self._options[self._group[slice_.parts[0].parameter]]))
        if encoder.encoding == Encoding.TOPK:
            velocity.mask(payload)
        return payload


class Velocity:
    """The velocity of one slice, as SGD makes it.

    Args:
        parameter: The parameter that the slice is of.
        start: The slice's first element.
        stop: One past its last.
    """

    def __init__(self, parameter: Tensor, start: int, stop: int) -> None:
        self._parameter = parameter.detach()
        self._start, self._stop = start, stop
        self._velocity: Tensor | None = None

    def add(self, gradient: Tensor, options: Mapping[str, Any]) -> Tensor:
        """What SGD would change with a gradient, but for the learning rate.

        Always in memory of its own: what was given last may still be on its way.
        """
        if options["weight_decay"]:
            values = self._parameter.reshape(-1)[self._start : self._stop].to("cpu")
            gradient = torch.add(gradient, values, alpha=options["weight_decay"])
        momentum = options["momentum"]
        if not momentum:
            return gradient
        if self._velocity is None:
            self._velocity = gradient.clone()
        else:
            self._velocity = torch.add(gradient, self._velocity, alpha=momentum)
        return torch.add(gradient, self._velocity, alpha=momentum) if options["nesterov"] else self._velocity

    def mask(self, payload: memoryview) -> None:
        """Forget the velocity where a payload of top-k holds something, unless it holds everything."""
        indices = indices_in(payload)
        if self._velocity is not None and len(indices) < self._velocity.numel():
            self._velocity[torch.from_numpy(indices)] = 0
