"""Recorder of training steps: it observes each event of a step once, and tells all readers of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

EVENTS = ("begin_batch", "before_backward", "before_step", "after_step", "end_batch")  # Methods of a reader.


class StepReader:
    """Base class of objects that read training steps. By default, all methods do nothing.

    Attributes:
        step: Number of the optimizer's step to which the current batch belongs, beginning with 1. Several batches have
            the same number if gradients are accumulated.
        follows_calls: Whether calls of modules are reported in the current batch. A reader sets this in
            :meth:`begin_batch`, because a hook takes time in each call.
        follows_to_next: Whether calls are also reported after the batch, until the next one begins.
    """

    step = 0
    follows_calls = follows_to_next = False

    def begin_batch(self, batch: Any, index: int) -> None:
        """Read a batch before it is trained on, with its number in the epoch."""

    def before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Read the positional arguments of a module."""

    def after_call(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """Read the output of a module. Return another output, or None to keep the output."""

    def before_backward(self, loss: Any) -> None:
        """Read a loss with its graph."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Read gradients before they are clipped."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Read weights, and the gradients with which an optimizer has made a step."""

    def end_batch(self, loss: Any) -> None:
        """Read the loss after a batch. The value is None if the training step has not returned a loss."""


class StepRecorder:
    """Hooks that tell readers about batches.

    Modules get only global hooks. Strategies look at the hooks of a user's modules, and would divide a network with
    additional hooks in another way.

    Args:
        readers: The readers, in the order in which they are told.
        optimizers: Optimizers whose steps are reported.
    """

    def __init__(self, readers: Sequence[StepReader] = (), optimizers: Sequence[Optimizer] = ()) -> None:
        self._readers = readers
        self._methods = {event: _methods(readers, event) for event in EVENTS}
        self._followers: list[StepReader] = []
        self._call_hooks: list[RemovableHandle] = []
        self._step_hooks = [
            optimizer.register_step_post_hook(lambda optimizer, *_: self._tell("after_step", optimizer))
            for optimizer in optimizers
        ]

    def begin_batch(self, batch: Any, index: int, steps: int) -> None:
        """Tell readers about a batch.

        Args:
            batch: The batch.
            index: Number of the batch in the epoch.
            steps: Number of steps that the optimizers have made.
        """
        _remove(self._call_hooks)
        for reader in self._readers:
            reader.step = steps + 1
        self._tell("begin_batch", batch, index)
        self._followers = [reader for reader in self._readers if reader.follows_calls]
        if self._followers:
            self._call_hooks.append(register_module_forward_pre_hook(self._before_call))
            self._call_hooks.append(register_module_forward_hook(self._after_call))

    def before_backward(self, loss: Any) -> None:
        """Tell readers about a loss."""
        self._tell("before_backward", loss)

    def before_step(self, optimizer: Optimizer) -> None:
        """Tell readers that an optimizer is going to make a step."""
        self._tell("before_step", optimizer)

    def end_batch(self, outputs: Any) -> None:
        """Tell readers about the outputs of the training step."""
        self._followers = [reader for reader in self._followers if reader.follows_to_next]
        if not self._followers:
            _remove(self._call_hooks)
        self._tell("end_batch", loss_of(outputs))

    def end(self) -> None:
        """Remove the hooks."""
        _remove(self._call_hooks)
        _remove(self._step_hooks)

    def _before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for reader in self._followers:
            reader.before_call(module, arguments)

    def _after_call(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        for reader in self._followers:
            changed = reader.after_call(module, arguments, output)
            output = output if changed is None else changed
        return output

    def _tell(self, event: str, *values: Any) -> None:
        for method in self._methods[event]:
            method(*values)


def loss_of(outputs: Any) -> Any:
    """Return the loss among the outputs of a training step."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _methods(readers: Sequence[StepReader], name: str) -> list[Callable[..., Any]]:
    """Return a method of the readers whose classes have written it, because each call takes time in each step."""
    return [getattr(reader, name) for reader in readers if getattr(type(reader), name) is not getattr(StepReader, name)]


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
