"""Find out whether a stage's backward mixes samples, or stores values.

A hook of a module, or an autograd function of the user's, may change gradients in the backward. A hook that divides a
gradient by its norm, for example, gives a sample another gradient in another batch. The probe compares the gradients of
two samples with those of each of the two samples. It also finds hooks that store values in the backward.

The probe needs little memory: the activations of two samples, and no gradients of large parameters. Of these gradients
it keeps sketches, see :class:`Sketch`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import reentrant_checkpoints, without_tensor_hooks
from cnnstrategies.pipeline.combining import is_near
from cnnstrategies.pipeline.mixing import Arguments, MixingProbe, join, rows_of
from cnnstrategies.pipeline.part_gradients import without_gradients


def reason_of_backward(
    probe: MixingProbe, arguments: Sequence[Arguments], samples: Sequence[int], has_rows: Sequence[bool]
) -> str | None:
    """Return why a stage must run the whole batch as one microbatch because of its backward; None if it need not.

    Args:
        probe: The probe of the stage's forward.
        arguments: The stage's arguments for some microbatches.
        samples: Number of samples of each of these microbatches; two or more in all.
        has_rows: See `ProbeResult.has_rows`.
    """
    whole, count = arguments[0], samples[0]
    if count == 1:
        whole, count = join(arguments[:2], samples[:2]), sum(samples[:2])
    try:
        with probe.fixed(has_backward=True):
            return _compare(_Runs(probe, whole, count, has_rows))
    except Exception as error:
        return f"its backward cannot run for parts of the batch ({type(error).__name__}: {error})"


class _Runs:
    """Runs a stage with some of the first two samples of a batch, forward and backward.

    Args:
        probe: The probe of the stage's forward.
        whole: The stage's arguments for the batch.
        samples: Number of samples in the batch.
        has_rows: See `ProbeResult.has_rows`.
    """

    def __init__(self, probe: MixingProbe, whole: Arguments, samples: int, has_rows: Sequence[bool]) -> None:
        self._probe, self._has_rows = probe, has_rows
        self._whole, self._samples = whole, samples
        self._starts: tuple[Tensor | None, ...] | None = None  # Gradients with which the backward of both begins.

    def of(self, *rows: int) -> "ProbedRun":
        """Return a run with samples, each of which has the number 0 or 1. The first run must have both."""
        run = ProbedRun(self._probe, _chosen(self._whole, self._samples, rows))
        if self._starts is None:
            outputs = zip(run.outputs, self._has_rows, strict=True)
            self._starts = tuple(_noise(tensor) if rows else None for tensor, rows in outputs)
        run.backward(_chosen(self._starts, 2, rows))
        return run


def _compare(runs: _Runs) -> str | None:
    # One after the other, so that the activations of one run exist at a time.
    both, first, second = runs.of(0, 1), runs.of(0), runs.of(1)
    stored = next((key for run in (both, first, second) for key in run.stored), None)
    if stored is not None:
        return f"a hook stores {stored} in the backward"
    inputs = ComparedGradients(
        [gradient if gradient is None else Sketch.whole(gradient) for gradient in both.gradients]
    )
    parameters = ComparedGradients(both.sketches)
    of_inputs, of_parameters = (first.gradients, second.gradients), (first.of_parameters, second.of_parameters)
    if inputs.are_near(*of_inputs) and parameters.are_near(*of_parameters):
        return None
    # A kernel may round otherwise for another number of samples. A value near 0 then gets another sign, and a ReLU
    # another derivative there, so that few elements of a gradient differ by much. Among batches of the same size, a
    # sample's values are the same in each bit.
    if not (inputs.are_alike(*of_inputs) and parameters.are_alike(*of_parameters)):
        return _MIXES
    twice, other, swapped = runs.of(0, 0), runs.of(1, 1), runs.of(1, 0)
    rows = [
        _first_and_second(*column) for column in zip(twice.gradients, other.gradients, first.gradients, strict=True)
    ]
    columns = zip(twice.of_parameters, other.of_parameters, swapped.of_parameters, strict=True)
    sums = [a if a is None or b is None or c is None else a + b - c for a, b, c in columns]
    compare = parameters.are_alike if parameters.have_low_precision else parameters.are_near
    return None if inputs.are_near(rows) and compare(sums) else _MIXES


def _first_and_second(of_first: Tensor | None, of_second: Tensor | None, alone: Tensor | None) -> Tensor | None:
    """Return the gradient of a tensor in the order of the samples, from two batches that repeat a sample.

    Args:
        of_first: Gradient for the first sample twice.
        of_second: Gradient for the second sample twice.
        alone: Gradient for one sample. If it has the same shape, the tensor has no rows for the samples.
    """
    if of_first is None or of_second is None or alone is None or of_first.shape == alone.shape:
        return of_first
    return torch.cat([of_first.chunk(2)[0], of_second.chunk(2)[1]])


_MIXES = "its backward (a hook, or an autograd function of its own) gives a sample another gradient in another batch"


class ProbedRun:
    """A forward and a backward of a stage.

    Attributes:
        outputs: Tensors of the stage's result, until :meth:`backward`; None for other values.
        gradients: Gradients of the stage's tensors, after :meth:`backward`.
        sketches: Sketches of the gradients of the stage's parameters; None for parameters without a gradient.
        stored: What the backward has stored, see `StoredWatch.take`.
    """

    def __init__(self, probe: MixingProbe, arguments: Arguments) -> None:
        self._probe = probe
        result, self._inputs = probe.run(arguments, needs_gradient=True)
        probe.watch.take()
        self.outputs = [
            leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in tree_leaves(result)
        ]
        self.gradients: Sequence[Tensor | None] = ()
        self.sketches: list[Sketch | None] = []
        self.stored: dict[Any, Any] = {}

    @property
    def of_parameters(self) -> list[Tensor | None]:
        """Sketches of the gradients of the stage's parameters, after :meth:`backward`."""
        return [sketch and sketch.values for sketch in self.sketches]

    def backward(self, starts: Sequence[Tensor | None]) -> None:
        """Compute the gradients of inputs and parameters from the gradients of the outputs."""
        parameters = self._probe.parameters()
        self.sketches = [None] * len(parameters)
        pairs = [(o, g) for o, g in zip(self.outputs, starts, strict=True) if o is not None and g is not None]
        self.outputs = []
        inputs = [*self._inputs, *parameters]
        if pairs and inputs:
            outputs, begins = zip(*pairs, strict=True)
            del pairs
            with without_tensor_hooks(parameters), without_gradients(parameters), reentrant_checkpoints():
                handles = [self._sketch(index, parameter) for index, parameter in enumerate(parameters)]
                try:
                    gradients = torch.autograd.grad(outputs, inputs, begins, allow_unused=True)
                finally:
                    for handle in handles:
                        handle.remove()
            self.gradients = gradients[: len(self._inputs)]
        self.stored = self._probe.watch.take()

    def _sketch(self, index: int, parameter: Tensor) -> Any:
        """Register a hook of a parameter that keeps a sketch of the parameter's gradient, and drops the gradient."""

        def hook(gradient: Tensor) -> Tensor:
            self.sketches[index] = Sketch.of(gradient)
            return gradient.new_zeros(()).expand(gradient.shape)

        return parameter.register_hook(hook)  # type: ignore[no-untyped-call]


def _noise(output: Tensor | None) -> Tensor | None:
    """Return the gradient with which the backward of an output begins."""
    if output is None:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def _chosen(arguments: Arguments, samples: int, rows: Sequence[int]) -> Arguments:
    """Return the arguments for a batch of samples with some numbers."""
    parts = [rows_of(arguments, samples, row, row + 1) for row in rows]

    def joined(whole: Any, *leaves: Any) -> Any:
        if isinstance(whole, Tensor) and whole is not leaves[0]:
            return torch.cat(leaves)
        return len(rows) if type(whole) is int and whole == samples else whole

    result: Arguments = tree_map(joined, arguments, *parts)
    return result


# A gradient is a sum over many values, so rounding changes it more than a result of the forward.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION = 0.1
# Largest difference between a gradient and the same gradient in a batch of another size, relative to the gradient, if
# rounding changes the signs of single values. A hook that divides a gradient by the size of the batch changes it more.
_ALIKE = 0.25
# Number of elements of a gradient that are added to one element of a sketch. Smaller gradients are kept as they are.
_ADDED, _SMALL = 64, 4096
CHUNK = 2**20  # Number of elements that are converted at once; a multiple of the number above.


class Sketch(NamedTuple):
    """The compared values of a gradient: sums over groups of its elements, each multiplied by a fixed weight.

    The sketch of a sum of gradients is the sum of their sketches. Two gradients that differ have different sketches,
    except by a coincidence that would need these weights.

    Attributes:
        values: The sums; all elements of a small gradient.
        largest: Largest magnitude of an element (1,).
        dtype: Type of the gradient.
    """

    values: Tensor
    largest: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, gradient: Tensor) -> "Sketch":
        """Return the sketch of a gradient."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        flat = gradient.detach().reshape(-1)
        largest = _largest(flat).to(wide)
        if len(flat) <= _SMALL:
            return cls(flat.to(wide, copy=True), largest, gradient.dtype)
        weights = torch.randn(_ADDED, generator=torch.Generator().manual_seed(0)).to(flat.device, wide)
        end = len(flat) // _ADDED * _ADDED
        chunks = [(chunk.to(wide).view(-1, _ADDED) * weights).sum(1) for chunk in torch.split(flat[:end], CHUNK)]
        return cls(torch.cat([*chunks, flat[end:].to(wide)]), largest, gradient.dtype)

    @classmethod
    def whole(cls, gradient: Tensor) -> "Sketch":
        """Return all elements of a gradient."""
        return cls(gradient, _largest(gradient), gradient.dtype)

    @property
    def limit(self) -> float:
        """Largest difference that rounding may cause, relative to the largest element."""
        is_low = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return _LOW_PRECISION if is_low else _LIMITS.get(self.dtype, _LOW_PRECISION)


def _largest(gradient: Tensor) -> Tensor:
    """Return the largest magnitude of an element (1,)."""
    return (torch.linalg.vector_norm(gradient, torch.inf) if gradient.numel() else gradient.sum()).reshape(1)


class ComparedGradients:
    """The gradients of several tensors for a batch.

    Some gradients are zero but for rounding: the result of a softmax or of an instance normalisation does not depend on
    a bias in front of it. Differences are therefore compared with the largest of all gradients as well.

    Args:
        gradients: The gradients; None for tensors without a gradient.
    """

    def __init__(self, gradients: Sequence[Sketch | None]) -> None:
        self._gradients = gradients
        self._largest = max((float(gradient.largest) for gradient in gradients if gradient is not None), default=0.0)

    @property
    def have_low_precision(self) -> bool:
        """Whether a gradient has few digits. Rounding of a sum's terms may then be as large as the sum."""
        return any(gradient is not None and gradient.limit == _LOW_PRECISION for gradient in self._gradients)

    def are_near(self, *parts: Sequence[Tensor | None]) -> bool:
        """Whether all elements are the same, up to rounding.

        Args:
            parts: For each part of the batch the gradients. A gradient for the batch has the rows of those for the
                parts, or is their sum.
        """
        return self._agree(parts) and all(self._is_near(*pair) for pair in self._pairs(parts))

    def are_alike(self, *parts: Sequence[Tensor | None]) -> bool:
        """Whether most elements are the same, up to rounding. The arguments are those of :meth:`are_near`."""
        return self._agree(parts) and all(self._is_alike(*pair) for pair in self._pairs(parts))

    def _agree(self, parts: Sequence[Sequence[Tensor | None]]) -> bool:
        """Whether the same tensors have gradients."""
        columns = zip(self._gradients, *parts, strict=True)
        return all((whole is None) == all(part is None for part in column) for whole, *column in columns)

    def _pairs(self, parts: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[Sketch, Tensor]]:
        """Yield each gradient for the batch, and its values from the gradients for the parts."""
        for whole, *column in zip(self._gradients, *parts, strict=True):
            present = [gradient for gradient in column if gradient is not None]
            if whole is None:
                continue
            if present[0].shape == whole.values.shape:
                yield whole, torch.stack([*present]).sum(0)
            elif sum(map(len, present)) == len(whole.values):
                yield whole, torch.cat([*present])

    def _is_near(self, whole: Sketch, actual: Tensor) -> bool:
        # `is_near` compares with the largest element.
        scale = actual.new_full((1,), max(float(whole.largest), whole.limit * self._largest))
        first, second = (torch.cat([values.reshape(-1), scale]) for values in (actual, whole.values))
        return is_near(first, second, whole.limit)

    def _is_alike(self, whole: Sketch, actual: Tensor) -> bool:
        count = max(1, actual.numel())
        pair = (actual - whole.values, whole.values)
        difference, size = (float(torch.linalg.vector_norm(values.double())) / math.sqrt(count) for values in pair)
        return difference <= _ALIKE * max(size, whole.limit * self._largest)
