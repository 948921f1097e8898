"""The gradient scaler of precision ``16-mixed``, if servers run the optimizer and all workers skip the same steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cnnstrategies._torch_private import found_infinities


def enabled_scaler(precision: Any) -> GradScaler | None:
    """Return the gradient scaler of a precision plugin; None if the plugin does not scale losses."""
    scaler: GradScaler | None = getattr(precision, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


class JointScaler:
    """Replacement of the methods ``unscale_`` and ``step`` of a gradient scaler of torch.

    A scaler skips a step if a gradient of its own process is not finite. With servers the result must not depend on the
    worker whose gradient is not finite: the mean over the workers is not finite either, so on one device the step would
    be skipped. Therefore the workers agree before any gradient is sent. Each worker's scaler then skips the step, and
    changes its scale by torch's own rule, so the scales of all workers stay equal.

    Nothing of a skipped step is sent. A lossy compression therefore never receives a gradient that is not finite.

    Args:
        scaler: The scaler.
        agree: Function that returns whether the step must be skipped. Its argument is whether a gradient of this worker
            is not finite.
        counts: Function that returns whether this worker's gradients count in the current step. They do not count if
            the worker's batch only repeats samples.
        skip: Function that is called instead of the optimizer's step, if the step is skipped.
        device: Device of the parameters.
    """

    def __init__(
        self,
        scaler: GradScaler,
        agree: Callable[[bool], bool],
        counts: Callable[[], bool],
        skip: Callable[[], None],
        device: torch.device,
    ) -> None:
        self._scaler = scaler
        self._agree = agree
        self._counts = counts
        self._skip = skip
        self._device = device
        self._is_unscaled = self._skips = False
        vars(scaler).update(unscale_=self._unscale, step=self._step)

    def end(self) -> None:
        """Restore the scaler's own methods."""
        for name in ("unscale_", "step"):
            vars(self._scaler).pop(name, None)

    def _unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and let all workers agree whether to skip the step."""
        type(self._scaler).unscale_(self._scaler, optimizer)
        infinities = found_infinities(self._scaler, optimizer)
        is_infinite = any(bool(found) for found in infinities.values())
        if is_infinite and not self._counts():
            for gradient in _gradients(optimizer):
                gradient.zero_()  # With the weight 0, a gradient that is not finite would make the mean NaN.
            is_infinite = False
        self._is_unscaled, self._skips = True, self._agree(is_infinite)
        # `GradScaler.update` reads these numbers. There is none if no parameter has a gradient.
        for device in infinities or [self._device]:
            infinities[device] = torch.full((), float(self._skips), device=device)

    def _step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer's step, unless the workers have agreed to skip it.

        Lightning does not unscale the gradients of fused optimizers, which divide by the scale themselves. The servers
        do not know the scale, so such gradients are unscaled here.
        """
        if not self._is_unscaled:
            self._unscale(optimizer)
        self._is_unscaled = False
        if self._skips:
            return self._skip()
        return optimizer.step(*args, **kwargs)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
