"""Record what a run computes: the values and gradients of each module, the loss, and the gradients of parameters.

A value is kept as a sketch: for each sample, a few sums of the value's elements with random signs. Sketches are small,
and the size of the difference of two values follows from the difference of their sketches (Johnson-Lindenstrauss; signs
as in Achlioptas, "Database-friendly random projections", 2003).
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies._torch_private import hooks_of
from cnnstrategies.models.joined_batches import tensors_in
from cnnstrategies.models.samples import count_samples
from cnnstrategies.recording.steps import StepReader

SIGNS = 8  # Number of sums in a sketch of a sample.
# Number of elements in a block, and number of blocks with signs of their own. Signs for all elements of a large value
# would need much memory, so the sign of an element is the product of its sign in a block and the sign of the block.
BLOCK, BLOCKS = 1 << 16, 1 << 12
Kind = Literal["weight", "buffer", "input", "output", "loss", "gradient", "parameter gradient", "final gradient"]


@dataclass(frozen=True)
class SketchedValue:
    """Sketch of one value of a run.

    Attributes:
        step: Number of the batch in the run, beginning with 0. Weights and buffers are those before the batch; those at
            the end of the run have the number of batches.
        kind: Kind of the value.
        name: Name of the module, the parameter or the buffer; empty for the loss.
        call: Number of earlier calls of the module with this batch; 0 for other values.
        sketch: Sketch of shape (samples, ``SIGNS``). A value without a dimension for samples has one row.
        is_recorded: Whether autograd recorded the computation of the value.
        is_held: Whether this rank holds the value. All ranks read the parameters and buffers of other ranks.
    """

    step: int
    kind: Kind
    name: str
    call: int
    sketch: Tensor
    is_recorded: bool = True
    is_held: bool = True


@dataclass(frozen=True)
class ModuleNote:
    """Facts about a module that help to find the cause of a difference.

    Attributes:
        kind: Name of the module's class.
        has_batch_statistics: Whether the module normalises with the statistics of the batch.
        hooks: Names of the user's forward hooks and backward hooks of this module.
    """

    kind: str
    has_batch_statistics: bool
    hooks: tuple[str, ...]


@dataclass
class Trace:
    """Record of one rank's run.

    Attributes:
        values: All values, in the order in which they were computed.
        samples: Number of samples in each batch of this rank.
        modules: Facts about the modules. Keys are their names, in the order of the user's module.
        drawing: Names of the modules that have drawn random numbers.
    """

    values: list[SketchedValue] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    modules: dict[str, ModuleNote] = field(default_factory=dict)
    drawing: set[str] = field(default_factory=set)


@functools.cache
def _signs() -> tuple[Tensor, Tensor]:
    """Return random signs for the elements of a block, and for blocks. All processes have the same ones."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (BLOCK + BLOCKS, SIGNS), generator=generator).double() * 2 - 1
    return signs[:BLOCK], signs[BLOCK:]


def sketch_of(value: Tensor, by_sample: bool) -> Tensor:
    """Return the sketch of a value.

    Args:
        value: The value, whose first dimension is that of the samples if ``by_sample`` is true.
        by_sample: Whether each sample has a row of its own.

    Returns:
        A tensor in float64 of shape (samples or 1, ``SIGNS``), on the CPU.
    """
    rows = value.shape[0] if by_sample and value.dim() > 0 else 1
    flat = value.detach().cpu().double().reshape(rows, -1)
    signs, block_signs = _signs()
    sketch = torch.zeros(rows, SIGNS, dtype=torch.float64)
    for block, elements in enumerate(torch.split(flat, BLOCK, dim=1)):
        sketch = sketch + elements @ signs[: elements.shape[1]] * block_signs[block % BLOCKS]
    return sketch


class Tracer(StepReader):
    """Reader that keeps the trace of a run of training.

    Args:
        module: The user's module.
        noise: Seed of random errors that are added to the outputs of all layers and change their last bits. 0 if no
            errors are added.
        is_held: Function that tells whether this rank holds a parameter or buffer.
    """

    def __init__(self, module: LightningModule, noise: int, is_held: Callable[[Tensor], bool]) -> None:
        self._module, self._is_held = module, is_held
        parts = [(name, part) for name, part in module.named_modules() if name and not isinstance(part, Metric)]
        self._names = {id(part): name for name, part in parts}
        self._trace = Trace(modules={name: _facts(part) for name, part in parts})
        self._noise = torch.Generator().manual_seed(noise) if noise else None
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._generators: list[Tensor] = []  # States of torch's generator before the calls that have not yet ended.
        self.follows_calls = True

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        """Record the weights and buffers with which the module trains on a batch."""
        self._trace.samples.append(count_samples(batch))
        self._calls.clear()
        for name, parameter in self._module.named_parameters():
            self._add("weight", name, parameter, owner=parameter)
        for name, buffer in self._module.named_buffers():
            self._add("buffer", name, buffer, owner=buffer)

    @override
    def end_batch(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            self._add("loss", "", loss)

    @override
    def before_step(self, optimizer: Optimizer) -> None:
        """Record the gradients of parameters after the backward pass, before they are clipped."""
        for name, parameter in self._module.named_parameters():
            if parameter.grad is not None:
                self._add("parameter gradient", name, parameter.grad, owner=parameter)

    @override
    def after_step(self, optimizer: Optimizer) -> None:
        """Record the gradients with which an optimizer has made its step.

        Before its step they are not known, because Lightning lets the optimizer call the backward pass.
        """
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._module.named_parameters():
            if id(parameter) in parameters and parameter.grad is not None:
                self._add("final gradient", name, parameter.grad, owner=parameter)

    def save(self, file: Path, end: Mapping[str, Tensor]) -> None:
        """Save the trace.

        Args:
            file: File for the trace.
            end: Sketches of the weights and buffers at the end of the run. Keys are their names.
        """
        buffers, parameters = dict(self._module.named_buffers()), dict(self._module.named_parameters())
        for name, sketch in end.items():
            kind: Kind = "buffer" if name in buffers else "weight"
            is_held = self._is_held((buffers | parameters)[name])
            step = len(self._trace.samples)
            self._trace.values.append(SketchedValue(step, kind, name, 0, sketch, is_held=is_held))
        torch.save(self._trace, file)

    @override
    def before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if (name := self._names.get(id(module))) is None:
            return
        for value in _floating(arguments):
            self._add("input", name, value, by_sample=True)
        self._generators.append(torch.get_rng_state())

    @override
    def after_call(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        if (name := self._names.get(id(module))) is None:
            return None
        if not torch.equal(self._generators.pop(), torch.get_rng_state()):
            self._trace.drawing.add(name)
        is_leaf = next(module.children(), None) is None
        if self._noise is not None and is_leaf and isinstance(output, Tensor) and output.is_floating_point():
            output = output * _rounding(output, self._noise)
        call = self._calls[name, torch.is_grad_enabled()]
        self._calls[name, torch.is_grad_enabled()] += 1
        for value in _floating(output):
            self._add("output", name, value, call, by_sample=True)
            if value.requires_grad:
                value.register_hook(functools.partial(self._add_gradient, name, call))  # type: ignore[no-untyped-call]
        return output

    def _add_gradient(self, name: str, call: int, gradient: Tensor) -> None:
        self._add("gradient", name, gradient, call, by_sample=True)

    def _add(
        self,
        kind: Kind,
        name: str,
        value: Tensor,
        call: int = 0,
        by_sample: bool = False,
        owner: Tensor | None = None,
    ) -> None:
        with torch.no_grad():
            sketch = sketch_of(value, by_sample)
        step = len(self._trace.samples) - 1
        is_held = owner is None or self._is_held(owner)
        self._trace.values.append(SketchedValue(step, kind, name, call, sketch, torch.is_grad_enabled(), is_held))


def _floating(values: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(values) if tensor.is_floating_point())


def _facts(part: nn.Module) -> ModuleNote:
    has_statistics = isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats)
    names = (getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks_of(part))
    return ModuleNote(type(part).__name__, has_statistics, tuple(names))


def _rounding(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return factors that are 1, the next smaller number by the dtype's ``eps``, or the next larger one."""
    unit = torch.finfo(output.dtype).eps
    random = torch.randint(-1, 2, output.shape, generator=generator)
    return (1 + unit * random.double()).to(output.device, output.dtype)
