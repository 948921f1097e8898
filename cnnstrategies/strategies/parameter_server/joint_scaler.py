"""The gradient scaler of precision ``16-mixed``, if servers run the optimizer and all workers skip the same steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cnnstrategies._torch_private import found_infinities
from cnnstrategies.strategies.parameter_server.base import CoordinatedStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper


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
        strategy: The strategy, with an open session.
        stepper: Function that returns the connection to the worker that pushes the gradients.
    """

    def __init__(
        self, scaler: GradScaler, strategy: CoordinatedStrategy, stepper: Callable[[], Stepper | None]
    ) -> None:
        self._scaler = scaler
        self._strategy = strategy
        self._stepper = stepper
        self._is_unscaled = self._skips = False
        vars(scaler).update(unscale_=self.unscale, step=self.step)

    def end(self) -> None:
        """Restore the scaler's own methods."""
        for name in ("unscale_", "step"):
            vars(self._scaler).pop(name, None)

    def agree(self, is_infinite: bool) -> bool:
        """Return whether to skip the step. Workers that make their steps separately also skip them separately.

        Args:
            is_infinite: Whether a gradient of this worker is not finite.
        """
        strategy = self._strategy
        if not strategy.options.aggregates or strategy.world_size == 1:
            return is_infinite
        return any(strategy.gather(is_infinite, "skipped steps").values())

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and let the workers agree whether to skip the step."""
        type(self._scaler).unscale_(self._scaler, optimizer)
        infinities, stepper = found_infinities(self._scaler, optimizer), self._stepper()
        is_infinite = any(bool(infinity) for infinity in infinities.values())
        if is_infinite and stepper is not None and not stepper.unfinished.samples:
            # The batch only repeats samples, so that all workers have the same number of batches. Its gradients have
            # the weight 0, with which a gradient that is not finite would make the mean NaN.
            for gradient in _gradients(optimizer):
                gradient.zero_()
            is_infinite = False
        self._is_unscaled, self._skips = True, self.agree(is_infinite)
        # `GradScaler.update` reads these numbers. Without gradients there is none yet.
        for device in infinities or [self._strategy.root_device]:
            infinities[device] = torch.full((), float(self._skips), device=device)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer's step, unless the workers have agreed to skip it.

        Lightning does not unscale the gradients of fused optimizers, which divide by the scale themselves. The servers
        do not know the scale, so such gradients are unscaled here.
        """
        if not self._is_unscaled:
            self.unscale(optimizer)
        self._is_unscaled = False
        stepper = self._stepper()
        if self._skips and stepper is not None:
            return stepper.skip()
        return optimizer.step(*args, **kwargs)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
