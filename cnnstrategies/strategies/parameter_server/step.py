"""A worker's training step: gradients are sent during backward, and each forward waits for its own parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled, writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.specification import Specification, hyperparameters
from cnnstrategies.strategies.observer_hooks import tensors_in

NOTED_STEPS = 2  # First steps, which note the parameters that are read outside of their own modules.


class Stepper:
    """Connects a module's training to a worker.

    If no hook of the user can notice it, each gradient is pushed as soon as backward has accumulated it, and each
    module waits for its own parameters right before its forward. Otherwise gradients are sent in the optimizer's step,
    as they are then, and all values are awaited at the end of a step. A parameter that is read outside of its own
    module is awaited when a step begins. The first steps wait for all parameters, and note which ones are read so.

    Args:
        module: The module.
        worker: The worker, which sends gradients and receives values.
        specification: The run's specification.
        optimizer: The module's optimizer.
        early: Whether gradients may be sent before the hooks between backward and the optimizer's step.
        sees_weights: Names of the hooks that may read weights between two steps.
        sync_every: In mode ``local``, the worker's steps between two outer steps; else 0.
        own_steps: Initial value of the attribute, for a worker that joins others.

    Attributes:
        own_steps: In mode ``local``, the worker's steps since the last outer step.
        accumulating: Whether the next backward only accumulates gradients.
        eager: Whether all values are awaited at the end of each step.
        parameters: The trained parameters, in the order of the specification.
    """

    def __init__(
        self,
        module: LightningModule,
        worker: Worker | CombinedWorker,
        specification: Specification,
        optimizer: Optimizer,
        early: bool = True,
        sees_weights: Sequence[str] = (),
        sync_every: int = 0,
        own_steps: int = 0,
    ) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.eager = bool(sees_weights)
        self.own_steps = own_steps
        self._sync_every = sync_every
        self.accumulating = False
        self._samples = self._batches = 0  # Of the present step.
        self._left_out = 0  # Steps to leave out, including the present one.
        named = dict(module.named_parameters())
        self.parameters: list[nn.Parameter] = [named[info.name] for info in specification.parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._frozen = [not parameter.requires_grad for parameter in self.parameters]
        self._names = [info.name for info in specification.parameters]
        self._early = early
        self._sees_weights = sees_weights
        self._readers = Readers(module, self._index)
        self._noted = 0  # Steps in which reads were noted.
        # Reads inside compiled code cannot be noted.
        if is_compiled_whole(module) or any(is_compiled(child) for child in module.modules()):
            self._noted, self._readers.indices = NOTED_STEPS, set(range(len(self.parameters)))
        self._waited: set[int] = set()  # Parameters whose modules have computed in this step.
        self._written = [writes(parameter) for parameter in self.parameters]
        self._memory = [parameter.data_ptr() for parameter in self.parameters]
        self._received: list[Tensor] | None = None  # Copies of the received values, if hooks may write weights.
        self._received_from: int | None = None  # The rank that received them for this node.
        self._in_step = False
        self._codecs = worker.codecs
        self._pushed: dict[int, tuple[Tensor, int]] = {}  # Gradients, with their write counts when they were sent.
        self._options = [group.options for group in specification.groups]  # In mode local those of the outer optimizer.
        self._handles: list[Any] = []
        if not sync_every and early:
            for index, parameter in enumerate(self.parameters):
                if self._frozen[index]:
                    continue
                handle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        for child in () if sync_every else module.modules():
            indices = [self._index[id(p)] for p in child.parameters(recurse=False) if id(p) in self._index]
            if indices:
                # Must run before hooks that compute a weight from other parameters, as torch's weight_norm does.
                self._handles.append(child.register_forward_pre_hook(self._waiter(indices), prepend=True))
        if not sync_every:
            self._handles.append(optimizer.register_step_pre_hook(self._take_gradients))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leaves_out(self) -> bool:
        """Return whether the next batch belongs to a step that the others have made already, and is left out.

        The trainer still counts these steps, so that schedules and the end of the epoch stay where they are.
        """
        if isinstance(self.worker, CombinedWorker) and not self._left_out and not self._batches:
            self.worker.wait(0)  # The forward waits for it anyway, and its version shows how far the others are.
            if self.worker.late:
                self._left_out = self.worker.catch_up()
        return self._left_out > 0

    def count(self, samples: int) -> None:
        """Count a batch of the present step; its samples are part of the gradient's weight."""
        self._samples += samples
        self._batches += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround a batch's forward; wait first for the parameters that are read outside of their own modules."""
        if self._sync_every or self._noted >= NOTED_STEPS:
            for index in () if self._sync_every else self._readers.indices:
                self.worker.wait(index)
            yield
            return
        self.worker.wait_all()
        with self._readers.noting():
            yield

    def before_backward(self) -> None:
        """Begin the push of a step before its last backward, unless gradients only accumulate in this backward."""
        if self._early and not (self.accumulating or self._sync_every or self._left_out):
            self._begin()

    @property
    def begun(self) -> int:
        """Number of common steps that this worker has pushed or is pushing."""
        return self.worker.step + self._in_step

    def after_step(self, last: bool = False) -> None:
        """End a training step after the optimizer's step.

        Args:
            last: Whether the step is the last one of an epoch, after which hooks may read weights.
        """
        if self._sync_every:
            self.own_steps += 1
            if self.own_steps >= self._sync_every:
                self.outer_step()
        else:
            if self.eager or last:
                self.worker.wait_all()
            self.note_values()

    def note_values(self) -> None:
        """Note that the weights are the received ones, so that later writes by other code are found."""
        self._written = [writes(parameter) for parameter in self.parameters]
        self._memory = [parameter.data_ptr() for parameter in self.parameters]
        self._received_from = self.worker.leader
        if self._sees_weights and not self._sync_every:
            self._received = [parameter.detach().clone() for parameter in self.parameters]

    def outer_step(self) -> None:
        """Let the servers make an outer step of mode ``local``, and take its weights.

        Without own steps there is no outer step, because momentum alone must not move the weights.
        """
        if not self.own_steps:
            return
        assert not isinstance(self.worker, CombinedWorker), "in mode local each worker pushes for itself"
        self.worker.begin_step(self._options, self._samples)
        self._log_codecs()
        for index, parameter in enumerate(self.parameters):
            self.worker.push(index, parameter.detach())
        self.worker.end_step()
        self.own_steps = self._samples = self._batches = 0
        self.worker.wait_all()

    def _begin(self) -> None:
        if not self._in_step:
            self.worker.begin_step(hyperparameters(self.optimizer), self._samples)
            self._in_step = True
            self._pushed.clear()
            self._log_codecs()

    def _log_codecs(self) -> None:
        if self.worker.codecs != self._codecs:
            self._codecs = pushes, pulls = self.worker.codecs
            rank_zero_info(f"From step {self.worker.step} on compression: {pushes}, pull_compression: {pulls}")

    def _end(self) -> None:
        self.worker.end_step()
        self._noted += 1
        self._waited.clear()
        self._in_step = False
        self._samples = self._batches = 0

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def push(parameter: Tensor) -> None:
            if self._in_step and parameter.grad is not None:
                self.worker.push(index, parameter.grad)
                self._pushed[index] = parameter.grad, writes(parameter.grad)

        return push

    def _waiter(self, indices: list[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            for index in indices:
                self.worker.wait(index)
            self._waited.update(indices)

        return wait

    def _take_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the optimizer's step run its closure, push the gradients, and find none: the servers make the step."""
        closure = kwargs["closure"]

        def closure_then_push() -> Any:
            output = closure()
            if self._left_out:
                self._left_out -= 1
                return output
            self._check()
            self._begin()
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None and index not in self._pushed:
                    self.worker.push(index, parameter.grad)
                parameter.grad = None
            self._end()
            return output

        return args, {**kwargs, "closure": closure_then_push}

    def _check(self) -> None:
        """Refuse uses of gradients or weights that would have another result than on one device.

        Raises:
            ConfigurationError: A gradient was changed after it was sent, a weight was read before it was received or
                was changed between two steps, or a frozen parameter has a gradient.
        """
        for index, (gradient, version) in self._pushed.items():
            present = self.parameters[index].grad
            if present is not gradient or writes(present) != version:
                raise ConfigurationError(
                    f"the gradient of {self._names[index]} was changed after backward had sent it to the servers: "
                    "change gradients in on_after_backward or on_before_optimizer_step of the module or of a callback, "
                    "which strategy parameter_server waits for, or use strategy ddp"
                )
        changed = self._changed()
        awaited = self._readers.indices if self._noted >= NOTED_STEPS else range(len(self.parameters))
        for index, parameter in enumerate(self.parameters):
            if self._frozen[index]:
                if parameter.grad is not None:
                    raise ConfigurationError(
                        f"{self._names[index]} was frozen when training began and has a gradient now, so the servers "
                        "do not train it: train the parts one after the other in two fits, or use strategy ddp"
                    )
                continue
            if parameter.grad is not None and index not in self._waited and index not in awaited:
                raise ConfigurationError(
                    f"{self._names[index]} was used without a forward of its own module, unlike in the first "
                    f"{NOTED_STEPS} steps, and may have had the value of the step before: call its module, use the "
                    "parameter so from the first step on, or use strategy ddp"
                )
            # An assignment to `.data` does not count as a write, but it changes the memory. Weights without gradients
            # may have other memory, as an average of weights has.
            moved = parameter.grad is not None and parameter.data_ptr() != self._memory[index]
            if moved or writes(parameter) != self._written[index] or changed[index]:
                suspects = f" (maybe by {', '.join(self._sees_weights)})" if self._sees_weights else ""
                raise ConfigurationError(
                    f"{self._names[index]} was changed between two steps, or in training_step{suspects}: the servers "
                    "hold the parameters, and would overwrite the change; use mode: local, or strategy ddp"
                )

    def _changed(self) -> list[bool]:
        """Return for each parameter whether its value differs from the received one, if hooks may write weights."""
        # A new leader of the node brings the values of the servers' present step, which may be newer.
        if self._received is None or self._received_from != self.worker.leader:
            return [False] * len(self.parameters)
        pairs = zip(self.parameters, self._received, strict=True)
        # One read for all parameters, because each read waits for the device.
        different: list[bool] = torch.stack([(value != received).any() for value, received in pairs]).tolist()
        return different


class Readers(TorchFunctionMode):
    """Mode that notes which parameters are read while none of their own modules computes.

    Examples are a head's weight that is passed to ``F.linear``, the last layer of ``nn.MultiheadAttention``, which is
    never called, a weight in a penalty, and a weight that a moving average follows.

    Attributes:
        indices: Numbers of the noted parameters.

    Args:
        module: The module.
        index: Numbers of the parameters, by their ids.
    """

    def __init__(self, module: nn.Module, index: Mapping[int, int]) -> None:
        super().__init__()
        self.indices: set[int] = set()
        self._module = module
        self._index = index
        self._computing: list[nn.Module] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the reads inside this context."""
        with ExitStack() as stack:
            for child in self._module.modules():
                for handle in _noted(child, self._computing):
                    stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Note the parameters among the arguments of a function, and call it."""
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            index = self._index.get(id(tensor))
            if index is not None and not any(tensor is parameter for parameter in self._computing_parameters()):
                self.indices.add(index)
        return func(*args, **(kwargs or {}))

    def _computing_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of the modules that are computing now."""
        for module in self._computing:
            yield from module.parameters(recurse=False)


def _noted(child: nn.Module, computing: list[nn.Module]) -> Iterator[RemovableHandle]:
    """Register hooks that note when a module computes, and yield their handles.

    The hooks are plain functions, because a copy of the module then shares them instead of copying what they refer to.
    """

    def begin(module: nn.Module, *_: Any) -> None:
        computing.append(module)

    def end(module: nn.Module, *_: Any) -> None:
        if computing and computing[-1] is module:
            computing.pop()

    yield child.register_forward_pre_hook(begin, prepend=True)
    yield child.register_forward_hook(end, always_call=True)
