"""Clipping that a module's own step asks for, with ``self.clip_gradients``, in manual optimization.

A worker has the gradients of its own images, but the norm of the mean gradient counts. So the servers clip, by limits
that the worker sends with the step.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import STEP_CLIP_NORM, STEP_CLIP_VALUE


class StepClips:
    """The limits for the next step of each optimizer, and the gradients that were clipped in earlier steps.

    Args:
        names: Name of each trained parameter, by the parameter's ``id()``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        # By the id of the optimizer: the limit by name, and the gradients with their write counts.
        self._limits: dict[int, tuple[dict[str, float], list[tuple[nn.Parameter, int]]]] = {}
        # By the id of the parameter: its gradient, with the write count that it had when it was pushed.
        self._clipped: dict[int, tuple[Tensor, int]] = {}

    def note(self, optimizer: Optimizer, name: str, limit: float, parameters: Sequence[nn.Parameter]) -> None:
        """Record a limit for the next step of an optimizer.

        Args:
            optimizer: The optimizer.
            name: ``STEP_CLIP_NORM`` or ``STEP_CLIP_VALUE``.
            limit: The limit.
            parameters: The optimizer's parameters.

        Raises:
            ConfigurationError: There is a limit for this step already.
        """
        if id(optimizer) in self._limits:
            raise ConfigurationError(
                f"clip_gradients was called twice before a step of {type(optimizer).__name__}, but strategy "
                "parameter_server clips once, in the step: call it once, or use strategy ddp"
            )
        noted = [(parameter, writes(parameter.grad)) for parameter in parameters if parameter.grad is not None]
        self._limits[id(optimizer)] = {name: float(limit)}, noted

    def take(self, optimizer: Optimizer) -> Mapping[str, float]:
        """Return both limits for a step that begins; a limit of 0 does not clip.

        Raises:
            ConfigurationError: A gradient was changed after the call of ``clip_gradients``.
        """
        limits, noted = self._limits.pop(id(optimizer), ({}, []))
        for parameter, version in noted:
            if parameter.grad is None or writes(parameter.grad) != version:
                raise ConfigurationError(
                    f"a gradient was changed after clip_gradients and before the step of {type(optimizer).__name__}, "
                    "but strategy parameter_server clips in the step: call clip_gradients right before step, or use "
                    "strategy ddp"
                )
            self._clipped[id(parameter)] = parameter.grad, version
        return {STEP_CLIP_NORM: 0.0, STEP_CLIP_VALUE: 0.0, **limits}

    def check_kept(self, parameter: nn.Parameter) -> None:
        """Refuse a backward that has added to a gradient which the servers have clipped, and this worker has not.

        Args:
            parameter: The parameter whose gradient was accumulated.

        Raises:
            ConfigurationError: A clipped gradient was kept after its step.
        """
        gradient, version = self._clipped.pop(id(parameter), (None, 0))
        # A gradient that was set to zero in place was written twice.
        if gradient is not None and parameter.grad is gradient and writes(gradient) == version + 1:
            raise ConfigurationError(
                f"the gradient of {self._names[id(parameter)]} was kept after a step with clip_gradients, but only the "
                "servers have clipped it: call zero_grad after the step, or use strategy ddp"
            )
