"""How gradients leave during backward, and how a forward waits for its own parameters only."""

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

NOTED_STEPS = 2  # in which it is found out who reads parameters


class Stepper:
    """Connects a module's training to a worker.

    Where nobody else looks, each gradient is pushed by a hook as soon as backward has accumulated it, and each module
    waits for its own parameters right before its forward. Else gradients leave in the optimizer's step, as they are
    there, and all values are there when a step ends. Parameters that others than their own modules read are waited for
    when a step begins; the first steps wait for all, and find out which these are.

    Args:
        early: Whether gradients may leave before the hooks between backward and the optimizer's step.
        sees_weights: Who may look at weights between two steps, for whom all are waited for when one ends.
        sync_every: In mode ``local``, own steps between two outer ones; else 0.
        own_steps: What the others have made of these, where this one comes later.

    Attributes:
        own_steps: In mode ``local``, those since the last outer step.
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
        self._samples = self._batches = 0  # of the step
        self._left_out = 0  # steps, the present one among them
        named = dict(module.named_parameters())
        self.parameters: list[nn.Parameter] = [named[info.name] for info in specification.parameters]
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._frozen = [not parameter.requires_grad for parameter in self.parameters]
        self._names = [info.name for info in specification.parameters]
        self._early = early
        self._sees_weights = sees_weights
        self._readers = Readers(module, self._index)
        self._noted = 0  # steps in which readers are noted
        if is_compiled_whole(module) or any(is_compiled(child) for child in module.modules()):  # Nobody sees inside.
            self._noted, self._readers.found = NOTED_STEPS, set(range(len(self.parameters)))
        self._waited: set[int] = set()  # parameters whose modules have computed in this step
        self._written = [writes(parameter) for parameter in self.parameters]
        self._memory = [parameter.data_ptr() for parameter in self.parameters]
        self._had: list[Tensor] | None = None  # the values that came, where somebody may write others
        self._had_from: int | None = None  # the rank that spoke for this node
        self._in_step = False
        self._codecs = worker.codecs
        self._pushed: dict[int, tuple[Tensor, int]] = {}  # gradients, and their versions when they left
        self._options = [group.options for group in specification.groups]  # in mode local the outer optimizer's
        self._handles: list[Any] = []
        if not sync_every and early:
            for index, parameter in enumerate(self.parameters):
                if self._frozen[index]:
                    continue
                handle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        for child in () if sync_every else module.modules():
            own = [self._index[id(p)] for p in child.parameters(recurse=False) if id(p) in self._index]
            if own:
                # Before those that compute a weight from others, as torch's weight_norm does.
                self._handles.append(child.register_forward_pre_hook(self._waiter(own), prepend=True))
        if not sync_every:
            self._handles.append(optimizer.register_step_pre_hook(self._take_gradients))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leaves_out(self) -> bool:
        """Whether the batch that comes is of a step that the others have made already: it would be worked on in vain.

        The steps' numbers stay those of the trainer, and with them schedules and the end of the epoch.
        """
        if isinstance(self.worker, CombinedWorker) and not self._left_out and not self._batches:
            self.worker.wait(0)  # The forward waits for it anyway. It says how far the others are.
            if self.worker.late:
                self._left_out = self.worker.catch_up()
        return self._left_out > 0

    def count(self, samples: int) -> None:
        """A batch of so many samples is worked on: by their number the gradient counts."""
        self._samples += samples
        self._batches += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A batch's forward: what others than its own modules read is there when it begins."""
        if self._sync_every or self._noted >= NOTED_STEPS:
            for index in () if self._sync_every else self._readers.found:
                self.worker.wait(index)
            yield
            return
        self.worker.wait_all()
        with self._readers.noting():
            yield

    def before_backward(self) -> None:
        """The next backward is the last one of a step, unless gradients are being accumulated."""
        if self._early and not (self.accumulating or self._sync_every or self._left_out):
            self._begin()

    @property
    def begun(self) -> int:
        """How many common steps this worker has pushed, or is pushing; where a node pushes as one it waits in that."""
        return self.worker.step + self._in_step

    def after_step(self, last: bool = False) -> None:
        """The optimizer's step was made: in mode ``local`` by the optimizer itself.

        Args:
            last: Whether it is the epoch's: what runs at its end may look at weights.
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
        """The weights are those that came: whoever writes others from now on is found."""
        self._written = [writes(parameter) for parameter in self.parameters]
        self._memory = [parameter.data_ptr() for parameter in self.parameters]
        self._had_from = self.worker.leader
        if self._sees_weights and not self._sync_every:
            self._had = [parameter.detach().clone() for parameter in self.parameters]

    def outer_step(self) -> None:
        """In mode ``local``, have the servers make an outer step of what own steps have changed, and go on from there.

        After none it is left out: the momentum alone must not move the weights.
        """
        if not self.own_steps:
            return
        assert not isinstance(self.worker, CombinedWorker), "in mode local each pushes for itself"
        self.worker.begin_step(self._options, self._samples)
        self._tell_of_codecs()
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
            self._tell_of_codecs()

    def _tell_of_codecs(self) -> None:
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
        """Have the optimizer's step run its closure, and find no gradients after it: the servers have them."""
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
        """See that nobody has looked at, or changed, what was sent sooner or came later than on one device."""
        for index, (gradient, version) in self._pushed.items():
            now = self.parameters[index].grad
            if now is not gradient or writes(now) != version:
                raise ConfigurationError(
                    f"the gradient of {self._names[index]} was changed after backward, when it was on its way to the "
                    "servers: change gradients in on_after_backward or on_before_optimizer_step of the module or of a "
                    "callback, which strategy parameter_server waits for, or use strategy ddp"
                )
        written = self._written_by_others()
        late = self._readers.found if self._noted >= NOTED_STEPS else range(len(self.parameters))
        for index, parameter in enumerate(self.parameters):
            if self._frozen[index]:
                if parameter.grad is not None:
                    raise ConfigurationError(
                        f"{self._names[index]} was frozen when training began, and has a gradient now: the servers "
                        "were not given it; train the parts one after the other in two fits, or use strategy ddp"
                    )
                continue
            if parameter.grad is not None and index not in self._waited and index not in late:
                raise ConfigurationError(
                    f"{self._names[index]} was used without a forward of its own module, as in none of the first "
                    f"{NOTED_STEPS} steps: its value may have been that of the step before; call its module, use it so "
                    "from the first step on, or use strategy ddp"
                )
            # `.data =` counts no write; an average of weights, which has no gradient, may have its own memory.
            moved = parameter.grad is not None and parameter.data_ptr() != self._memory[index]
            if moved or writes(parameter) != self._written[index] or written[index]:
                who = f" (maybe by {', '.join(self._sees_weights)})" if self._sees_weights else ""
                raise ConfigurationError(
                    f"{self._names[index]} was changed between two steps, or in training_step{who}: the servers hold "
                    "the parameters, and would put theirs in its place; use mode: local, or strategy ddp"
                )

    def _written_by_others(self) -> list[bool]:
        """Which values are not those that came, where somebody may have written others; read at once."""
        # A leader that takes over brings the values of the servers' present step.
        if self._had is None or self._had_from != self.worker.leader:
            return [False] * len(self.parameters)
        pairs = zip(self.parameters, self._had, strict=True)
        different: list[bool] = torch.stack([(now != had).any() for now, had in pairs]).tolist()
        return different


class Readers(TorchFunctionMode):
    """Notes which parameters are read while none of their own modules computes.

    So is that of a head that is given to ``F.linear``, the last layer of ``nn.MultiheadAttention``, which is never
    called, a weight in a penalty, or one that a moving average follows.

    Attributes:
        found: The numbers of those that are.
    """

    def __init__(self, module: nn.Module, index: Mapping[int, int]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._module = module
        self._index = index
        self._computing: list[nn.Module] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what happens inside."""
        with ExitStack() as stack:
            for child in self._module.modules():
                for handle in _noted(child, self._computing):
                    stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """See what a function is given, and call it."""
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            index = self._index.get(id(tensor))
            if index is not None and not any(tensor is own for own in self._own()):
                self.found.add(index)
        return func(*args, **(kwargs or {}))

    def _own(self) -> Iterator[Tensor]:
        """The parameters of the modules that compute now."""
        for module in self._computing:
            yield from module.parameters(recurse=False)


def _noted(child: nn.Module, computing: list[nn.Module]) -> Iterator[RemovableHandle]:
    """Hooks that note when a module computes; functions, of which a copy of the module has no copies."""

    def begin(module: nn.Module, *_: Any) -> None:
        computing.append(module)

    def end(module: nn.Module, *_: Any) -> None:
        if computing and computing[-1] is module:
            computing.pop()

    yield child.register_forward_pre_hook(begin, prepend=True)
    yield child.register_forward_hook(end, always_call=True)
