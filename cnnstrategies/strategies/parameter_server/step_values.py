"""State of the weights between two steps and of the gradients in a step, in which changes by other code are found."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import STEP_CLIP_NORM, STEP_CLIP_VALUE


class ReceivedWeights:
    """State of the weights when the servers' values were received. If other code writes a weight later, it differs.

    Args:
        parameters: The trained parameters.
        compares: Whether hooks may write weights, so that the values themselves are compared.

    Attributes:
        frozen: For each weight: whether it is not trained, so that other code may write it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], compares: bool) -> None:
        self.frozen = [not parameter.requires_grad for parameter in parameters]
        self._parameters = parameters
        self._compares = compares
        # For each parameter: the write count and the memory address that it had when its value was received.
        self._written = [writes(parameter) for parameter in parameters]
        self._memory = [parameter.data_ptr() for parameter in parameters]
        self._copies: list[Tensor] | None = None  # The received values; None before the first values.
        self._leader: int | None = None  # Rank of the worker that received the values for this node.

    def note(self, leader: int | None) -> None:
        """Record the state of all weights, which now have the values that the servers sent.

        Args:
            leader: Rank of the worker that received the values for this node; None if each worker receives its own.
        """
        self._written = [writes(parameter) for parameter in self._parameters]
        self._memory = [parameter.data_ptr() for parameter in self._parameters]
        self._leader = leader
        if self._compares:
            self._copies = [parameter.detach().clone() for parameter in self._parameters]

    def unfreeze(self, index: int) -> None:
        """Record the state of a weight that is trained from now on."""
        self.frozen[index] = False
        self._written[index] = writes(self._parameters[index])
        self._memory[index] = self._parameters[index].data_ptr()

    def changed(self, leader: int | None) -> list[bool]:
        """Return, for each weight, whether it was changed since its value was received.

        Args:
            leader: Rank of the worker that receives the values for this node now.
        """
        # An assignment to `.data` does not increase the write count, but changes the memory address, so the address is
        # compared as well. If a weight has no gradient, a new address is allowed, because a callback may replace
        # weights by an average.
        return [
            differs
            or writes(parameter) != self._written[index]
            or (parameter.grad is not None and parameter.data_ptr() != self._memory[index])
            for index, (parameter, differs) in enumerate(zip(self._parameters, self._different(leader), strict=True))
        ]

    def _different(self, leader: int | None) -> list[bool]:
        """Return, for each weight, whether its values differ from the copies; False if there are no copies."""
        # A new leader of the node pulls the values again. They may be newer than the copies, so a comparison with the
        # copies would be wrong.
        if self._copies is None or self._leader != leader:
            return [False] * len(self._parameters)
        pairs = zip(self._parameters, self._copies, strict=True)
        # Each read of a result waits for the device, so the results for all parameters are read at once.
        different: list[bool] = torch.stack([_differ(value, copy) for value, copy in pairs]).tolist()
        return different


class StepGradients:
    """Gradients of a step: those that backward has pushed, and those that are hidden while the optimizer steps.

    Args:
        parameters: The trained parameters.
        names: Name of each parameter, for error messages.

    Attributes:
        open: Whether the push of a step has begun and not ended.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self.open = False
        self._names = names
        self._parameters = parameters
        # Keys: indices of parameters. Values: the gradient that was pushed in this step, and the gradient's write count
        # when it was pushed.
        self._pushed: dict[int, tuple[Tensor, int]] = {}
        self._hidden: dict[int, Tensor] = {}  # Keys: indices of parameters.

    def begin(self) -> None:
        """Begin the push of a step."""
        self.open = True
        self._pushed.clear()

    def note(self, index: int, gradient: Tensor) -> None:
        """Record that backward has pushed a gradient."""
        self._pushed[index] = gradient, writes(gradient)

    def left(self, held: Iterable[int]) -> list[tuple[int, Tensor]]:
        """Return the gradients that backward has not pushed, of the parameters with some indices."""
        gradients = ((index, self._parameters[index].grad) for index in held if index not in self._pushed)
        return [(index, gradient) for index, gradient in gradients if gradient is not None]

    def check(self) -> None:
        """Check that no gradient was changed after backward had pushed it.

        Raises:
            ConfigurationError: A gradient was changed.
        """
        for index, (gradient, version) in self._pushed.items():
            current = self._parameters[index].grad
            if current is not gradient or writes(current) != version:
                raise ConfigurationError(
                    f"the gradient of {self._names[index]} was changed after backward had sent it to the servers: "
                    "change gradients in a hook on_after_backward or on_before_optimizer_step, because strategy "
                    "parameter_server sends gradients after these hooks, or use strategy ddp"
                )

    def hide(self, held: Iterable[int]) -> None:
        """Hide the gradients of the parameters with some indices."""
        for index in held:
            parameter = self._parameters[index]
            if parameter.grad is not None:
                self._hidden[index] = parameter.grad
                parameter.grad = None

    def restore(self) -> None:
        """Make the hidden gradients readable again."""
        for index, gradient in self._hidden.items():
            self._parameters[index].grad = gradient
        self._hidden.clear()


class StepClips:
    """Clipping that a module's own step asks for, with ``self.clip_gradients``, in manual optimization.

    A worker has the gradients of its own images, but the norm of the mean gradient counts. So the servers clip, by
    limits that the worker sends with the step. This class has the limits for the next step of each optimizer, and the
    gradients that were clipped in earlier steps.

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


def _differ(value: Tensor, received: Tensor) -> Tensor:
    """Return whether two tensors differ, as a tensor with one boolean. NaN equals NaN, as after a run has diverged."""
    return ((value != received) & ~(value.isnan() & received.isnan())).any()
