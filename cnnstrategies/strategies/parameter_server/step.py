"""A worker's training step: hooks push gradients during backward, and make forward passes wait for new parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._torch_private import without_functions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.worker import CombinedWorker
from cnnstrategies.paramserver.joined_optimizers import members_of
from cnnstrategies.paramserver.specification import STEP_GROUP, Specification, hyperparameters
from cnnstrategies.strategies.parameter_server.readers import NOTED_STEPS, Readers
from cnnstrategies.strategies.parameter_server.served_state import ServedState
from cnnstrategies.strategies.parameter_server.step_values import ReceivedWeights, StepClips, StepGradients


@dataclass
class Unfinished:
    """The current step so far.

    Attributes:
        samples: Number of samples in the step's batches.
        batches: Number of the step's batches.
        left_out: Number of steps that this worker must skip, including the current step.
        own_steps: In mode ``local``, the number of steps of this worker since the last outer step.
        accumulating: Whether the next backward only accumulates gradients, which are not pushed yet.
    """

    samples: int = 0
    batches: int = 0
    left_out: int = 0
    own_steps: int = 0
    accumulating: bool = False

    def end(self) -> None:
        """Forget the batches of a step that was made or skipped."""
        self.samples = self.batches = 0


class Stepper:
    """Connection between the training of a module and the worker that communicates with the servers.

    Usually each gradient is pushed as soon as backward has accumulated it. If a hook of the user may read or change
    gradients after backward, all gradients are pushed later, in the optimizer's step.

    Usually each submodule waits for its own parameters right before its forward. If a hook of the user may read weights
    between two steps, each step waits for all parameters at its end.

    Code may also read a parameter while the forward of the parameter's submodule is not running. The first
    `NOTED_STEPS` steps wait for all parameters before the forward, and record which parameters are read like this.
    Later steps wait before the forward only for the recorded parameters.

    In manual optimization a batch may have steps of several optimizers, and several backward passes for a step. Each
    optimizer's step is a step of the run, in which this worker pushes the gradients of the optimizer's parameters. The
    worker then waits for all values. All steps count equally, because the batch's own losses are weighted.

    Args:
        module: The module that is trained.
        worker: The worker, which pushes gradients and pulls values.
        specification: The run's specification.
        optimizer: The module's optimizer, or its optimizers as one.
        early: Whether gradients may be pushed during backward. This is allowed if no hook of the user reads or changes
            gradients after backward, and if no gradient scaler may skip the step.
        sees_weights: Names of the hooks that may read weights between two steps.
        sync_every: In mode ``local``, the number of steps between two outer steps; otherwise 0.
        own_steps: Initial value of :attr:`Unfinished.own_steps`. The value is 0 unless this worker was restarted.

    Attributes:
        worker: The worker.
        optimizer: The module's optimizer, or its optimizers as one.
        parameters: The trained parameters, in the order of the specification.
        specification: The run's specification.
        unfinished: The current step so far.
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
        self._manual = not module.automatic_optimization
        if self._manual:
            early, sees_weights = False, (*sees_weights, f"{type(module).__name__}.training_step")
        self._sync_every = sync_every
        self.unfinished = Unfinished(own_steps=own_steps)
        self._groups = _members(optimizer)
        self.specification = specification
        named = dict(module.named_parameters())
        self.parameters: list[nn.Parameter] = [named[info.name] for info in specification.parameters]
        positions = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._early = early
        self._sees_weights = sees_weights
        self._readers = Readers(module, positions, self._manual)
        self._received = ReceivedWeights(self.parameters, compares=bool(sees_weights) and not sync_every)
        self._gradients = StepGradients(self.parameters, [info.name for info in specification.parameters])
        self._codecs = worker.codecs  # Encodings of pushes and of pulls in the last log line.
        self._handles: list[Any] = []  # Handles of all hooks that this object has registered.
        if not sync_every and early:
            for index, parameter in enumerate(self.parameters):
                if parameter.requires_grad:
                    self._push_from_backward(index)
        for child in () if sync_every else module.modules():
            indices = [positions[id(p)] for p in child.parameters(recurse=False) if id(p) in positions]
            if indices:
                # This hook must run first: another hook may compute a weight from parameters, as torch's weight_norm
                # does, and must read new values.
                self._handles.append(child.register_forward_pre_hook(self._waiter(indices), prepend=True))
        self._state = ServedState()
        self._clips = StepClips({id(parameter): self._name(index) for index, parameter in enumerate(self.parameters)})
        for parameter in (p for p in self.parameters if self._manual and p.requires_grad):
            check = self._clips.check_kept
            self._handles.append(parameter.register_post_accumulate_grad_hook(check))  # type: ignore[no-untyped-call]
        for member in () if sync_every else members_of(optimizer):
            member.state = self._state
            self._handles.append(member.register_step_pre_hook(self._take_gradients))
            self._handles.append(member.register_step_post_hook(self.restore_gradients))

    def _name(self, index: int) -> str:
        return self.specification.parameters[index].name

    def _push_from_backward(self, index: int) -> None:
        hook = self._hook(index)
        self._handles.append(self.parameters[index].register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove all hooks that this object has registered, and give the optimizer a state that can be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for member in members_of(self.optimizer):
            if member.state is self._state:
                member.state = defaultdict(dict)

    @property
    def groups_changed(self) -> bool:
        """Whether parameters were added to the optimizer, or moved, since this object was created."""
        return _members(self.optimizer) != self._groups

    def leaves_out(self) -> bool:
        """Return whether the next batch must be skipped, because the other nodes have already made the batch's step.

        The trainer still counts skipped steps, so that learning-rate schedules and the end of the epoch do not change.
        """
        if isinstance(self.worker, CombinedWorker) and not self.unfinished.left_out and not self.unfinished.batches:
            # The forward waits for parameter 0 anyway, and the version of this parameter shows how many steps the other
            # nodes have made.
            self.worker.wait(0)
            if self.worker.late:
                self.unfinished.left_out = self.worker.catch_up()
        return self.unfinished.left_out > 0

    def count(self, samples: int) -> None:
        """Add the samples of a batch to the current step.

        Args:
            samples: Number of samples in the batch. The servers weight the gradient of a step by the number of samples
                in all batches of the step.
        """
        self.unfinished.samples += samples
        self.unfinished.batches += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context for the forward of a batch.

        On entry the context waits for the parameters that code may read outside of their own modules.
        """
        if not self._sync_every:
            self._follow_unfreezing()
        if self._sync_every or not self._readers.records:
            for index in () if self._sync_every else self._readers.indices:
                self.worker.wait(index)
            yield
            return
        self.worker.wait_all()
        with self._readers.noting():
            yield

    def _check_held(self) -> None:
        """Refuse parameters that were added to the optimizer during a batch, which the servers do not hold yet."""
        if self.groups_changed:
            raise ConfigurationError(
                f"the optimizer had {len(self.parameters)} parameters when the batch began, and has "
                f"{sum(map(len, _members(self.optimizer)))} now: add parameters in on_train_batch_start, in "
                "on_train_epoch_start or in another hook that runs before the batch"
            )

    def _follow_unfreezing(self) -> None:
        """Train parameters that were unfrozen since the last step."""
        for index, parameter in enumerate(self.parameters):
            if not self._received.frozen[index] or not parameter.requires_grad:
                continue
            self.worker.wait(index)
            served = self.worker.parameters[index]
            rounding = 1e-2 if self.specification.pull_compression != "none" else 0.0  # Received values may be rounded.
            if not torch.allclose(served, parameter.detach(), rtol=rounding, atol=rounding**2):
                raise ConfigurationError(
                    f"{self._name(index)} was changed while it was frozen, and is trained now, but the servers hold "
                    "the old value: unfreeze it before a new fit, or use `mode: local` or strategy ddp"
                )
            # From now on the worker writes received values into the parameter itself.
            parameter.data = served
            if self._early:
                self._push_from_backward(index)
            self._received.unfreeze(index)

    def before_backward(self) -> None:
        """Begin to push gradients before the last backward of a step.

        Do nothing if gradients may not be pushed during backward, or if this worker skips the step.
        """
        if self._early and not (self.unfinished.accumulating or self._sync_every or self.unfinished.left_out):
            self._begin()

    @property
    def begun(self) -> int:
        """Number of the run's steps that this worker has begun.

        These are the completed steps, plus 1 while the worker pushes gradients.
        """
        return self.worker.step + self._gradients.open

    def after_step(self, last: bool = False) -> None:
        """End a training step. Call this after the optimizer's step.

        Args:
            last: Whether the step is the last step of an epoch. Hooks may read weights after the epoch, so this step
                waits for all values.
        """
        if self._sync_every:
            self.unfinished.own_steps += 1
            if self.unfinished.own_steps >= self._sync_every:
                self.outer_step()
        else:
            if self._sees_weights or last:
                self.worker.wait_all()
            self.note_values()

    def note_values(self) -> None:
        """Record the state of the weights, which now have the values that the servers sent.

        If other code writes a weight later, the difference from this state shows it.
        """
        self._received.note(self.worker.leader)

    def outer_step(self) -> None:
        """Push this worker's weights for an outer step of mode ``local``, and wait for the new weights.

        If this worker has made no steps since the last outer step, do nothing: the momentum alone must not change the
        weights.
        """
        if not self.unfinished.own_steps:
            return
        assert not isinstance(self.worker, CombinedWorker), "in mode local workers are not combined"
        # In mode local the servers' optimizer is the outer optimizer.
        self.worker.begin_step([group.options for group in self.specification.groups], self.unfinished.samples)
        self._log_codecs()
        for index, parameter in enumerate(self.parameters):
            self.worker.push(index, parameter.detach())
        self.worker.end_step()
        self.unfinished.end()
        self.unfinished.own_steps = 0
        self.worker.wait_all()

    def clip(self, optimizer: Optimizer, name: str, limit: float) -> None:
        """Let the servers clip the mean gradient in the next step of an optimizer.

        Args:
            optimizer: One of the module's optimizers.
            name: ``STEP_CLIP_NORM`` or ``STEP_CLIP_VALUE``.
            limit: Largest norm of the gradient, or largest absolute value of its elements.
        """
        self._clips.note(optimizer, name, limit, [self.parameters[index] for index in self._held_by(optimizer)])

    def _held_by(self, optimizer: Optimizer) -> list[int]:
        """Return the indices of the parameters in an optimizer."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [index for index, parameter in enumerate(self.parameters) if id(parameter) in held]

    def _begin(self, optimizer: Optimizer | None = None) -> None:
        if not self._gradients.open:
            self._check_held()
            options = hyperparameters(self.optimizer)
            if self.specification.clips_each_step and optimizer is not None:
                groups = [id(group) for group in self.optimizer.param_groups]
                options[0] |= {**self._clips.take(optimizer), STEP_GROUP: groups.index(id(optimizer.param_groups[0]))}
            self.worker.begin_step(options, 1 if self._manual else self.unfinished.samples)
            self._gradients.begin()
            self._log_codecs()

    def _log_codecs(self) -> None:
        if self.worker.codecs != self._codecs:
            self._codecs = pushes, pulls = self.worker.codecs
            rank_zero_info(f"From step {self.worker.step} on, compression is {pushes} and pull_compression is {pulls}")

    def _end(self) -> None:
        self.worker.end_step()
        self._gradients.open = False
        self._forget()

    def _forget(self) -> None:
        self._readers.end_step()
        self.unfinished.end()

    def skip(self) -> None:
        """Skip the optimizer's step and send nothing, because a gradient is not finite."""
        if self.unfinished.left_out:
            self.unfinished.left_out -= 1
            return
        self._check()
        self.worker.interrupt()  # The next step's time would include the skipped step.
        self._forget()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def push(parameter: Tensor) -> None:
            if self._gradients.open and parameter.grad is not None:
                self.worker.push(index, parameter.grad)
                self._gradients.note(index, parameter.grad)

        return push

    def _waiter(self, indices: list[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, args: Any) -> None:
            if self._gradients.open:
                return  # A forward during backward computes activations again, with the values of its first forward.
            for index in indices:
                self.worker.wait(index)
            self._readers.used.update(indices)

        return wait

    def _take_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Push the gradients and then hide them, at the end of the closure of the optimizer's step.

        This is a pre-hook of the optimizer's step. The servers update the parameters, so this worker's optimizer must
        leave them unchanged. An optimizer that finds no gradients does so. With a gradient scaler there is no closure,
        because Lightning has called it before the step.
        """
        self._state.readable = True
        if "closure" not in kwargs:
            self._push_all(optimizer)
            return args, kwargs
        closure = kwargs["closure"]

        def closure_then_push() -> Any:
            self._state.readable = False  # The closure calls hooks of the user.
            output = closure()
            self._state.readable = True
            with without_functions():  # The user's step may run in a mode that checks what it computes of gradients.
                self._push_all(optimizer)
            return output

        return args, {**kwargs, "closure": closure_then_push}

    def _push_all(self, optimizer: Optimizer) -> None:
        """Push the gradients of an optimizer's parameters that backward has not pushed, and hide these gradients.

        Push nothing in a skipped step.
        """
        held = self._held_by(optimizer)
        if self.unfinished.left_out:
            self.unfinished.left_out -= 1
            self._gradients.hide(held)
            return
        self._check()
        self._begin(optimizer)
        for index, gradient in self._gradients.left(held):
            self.worker.push(index, gradient)
        self._gradients.hide(held)
        self._end()

    def restore_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Make the gradients readable again. This is a post-hook of the optimizer's step.

        As on one device, the gradients stay until ``zero_grad``, and are added to the gradients of the next backward if
        the user's ``optimizer_zero_grad`` keeps them.
        """
        self._state.readable = False
        self._gradients.restore()

    def _check(self) -> None:
        """Refuse uses of gradients or weights that would give different results from a run on one device.

        Raises:
            ConfigurationError: A gradient was changed after it was pushed, a weight was read before it was received or
                was changed between two steps, or a frozen parameter has a gradient.
        """
        self._gradients.check()
        changed, awaited = self._received.changed(self.worker.leader), self._readers.awaited
        for index, parameter in enumerate(self.parameters):
            if self._received.frozen[index]:
                if parameter.grad is not None:
                    raise ConfigurationError(
                        f"{self._name(index)} was unfrozen during a batch: unfreeze it in on_train_batch_start, in "
                        "on_train_epoch_start or in another hook that runs before the batch"
                    )
                continue
            if parameter.grad is not None and index not in self._readers.used and index not in awaited:
                raise ConfigurationError(
                    f"{self._name(index)} was used although the forward of its own module did not run, and may have "
                    f"had an old value, because strategy parameter_server records such uses in the first {NOTED_STEPS} "
                    "steps only: call the module, use the parameter directly from the first step on, or use strategy "
                    "ddp"
                )
            if changed[index]:
                suspects = f" (maybe by {', '.join(self._sees_weights)})" if self._sees_weights else ""
                raise ConfigurationError(
                    f"{self._name(index)} was changed between two steps, or in training_step{suspects}: the servers "
                    "hold the parameters and would overwrite the change; use `mode: local`, or strategy ddp"
                )


def _members(optimizer: Optimizer) -> list[list[int]]:
    """Return the parameters in each parameter group of an optimizer, as values of ``id()``."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]
