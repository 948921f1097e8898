"""Find out whether a stage's backward mixes samples, or stores values.

A hook of a module, or an autograd function of the user's, may change gradients in the backward. A hook that divides a
gradient by its norm, for example, gives a sample another gradient in another batch. The probe compares the gradients of
two samples with those of each of the two samples. It also finds hooks that store values in the backward.

The probe needs little memory: the activations of two samples, and no gradients of large parameters. Of these gradients
it keeps sketches, see :class:`Sketch`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import reentrant_checkpoints, without_tensor_hooks
from cnnstrategies.pipeline.combining import is_near
from cnnstrategies.pipeline.mixing import Arguments, FixedDraws, MixingProbe, join, rows_of
from cnnstrategies.pipeline.part_gradients import without_gradients

# A gradient is a sum over many values, so rounding changes it more than a result of the forward.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION = 0.1
# Number of elements of a gradient that are added to one element of a sketch. Smaller gradients are kept as they are.
_ADDED, _SMALL = 64, 4096
CHUNK = 2**20  # Number of elements that are converted at once; a multiple of the number above.


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
    if samples[0] > 1:
        first, counts = arguments[0], (1, 1)
        whole = rows_of(first, samples[0], 0, 2)
        parts = [rows_of(first, samples[0], 0, 1), rows_of(first, samples[0], 1, 2)]
    else:
        parts, counts = list(arguments[:2]), (samples[0], samples[1])
        whole = join(parts, samples[:2])
    with probe.fixed(has_backward=True):
        return _compare(probe, whole, parts, counts, has_rows)


def _compare(
    probe: MixingProbe,
    whole: Arguments,
    parts: Sequence[Arguments],
    counts: tuple[int, int],
    has_rows: Sequence[bool],
) -> str | None:
    total = sum(counts)
    starts: list[Tensor | None] = []
    try:
        # One after the other, so that the activations of one run exist at a time.
        expected = ProbedRun(probe, whole)
        starts = [_noise(tensor) if rows else None for tensor, rows in zip(expected.outputs, has_rows, strict=True)]
        expected.backward(starts)
        actual = []
        for part, start, stop in zip(parts, (0, counts[0]), (counts[0], total), strict=True):
            actual.append(ProbedRun(probe, part))
            actual[-1].backward(rows_of(tuple(starts), total, start, stop))
    except Exception as error:
        return f"its backward cannot run for parts of the batch ({type(error).__name__}: {error})"
    stored = next((key for run in (expected, *actual) for key in run.stored), None)
    if stored is not None:
        return f"a hook stores {stored} in the backward"
    of_inputs = zip(expected.gradients, *(run.gradients for run in actual), strict=True)
    of_parameters = zip(expected.sketches, *(run.sketches for run in actual), strict=True)
    return None if all(map(_is_same_gradient, of_inputs)) and all(map(_is_same_sketch, of_parameters)) else _MIXES


_MIXES = "its backward (a hook, or an autograd function of its own) gives a sample another gradient in another batch"


class Sketch(NamedTuple):
    """Sums over groups of a gradient's elements, each multiplied by a fixed weight.

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
        largest = torch.linalg.vector_norm(flat, torch.inf).to(wide).reshape(1)
        if len(flat) <= _SMALL:
            return cls(flat.to(wide, copy=True), largest, gradient.dtype)
        weights = torch.randn(_ADDED, generator=torch.Generator().manual_seed(0)).to(flat.device, wide)
        end = len(flat) // _ADDED * _ADDED
        chunks = [(chunk.to(wide).view(-1, _ADDED) * weights).sum(1) for chunk in torch.split(flat[:end], CHUNK)]
        return cls(torch.cat([*chunks, flat[end:].to(wide)]), largest, gradient.dtype)


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
        self._inputs: list[Tensor] = []
        probe.restore_random()
        with FixedDraws():  # type: ignore[no-untyped-call]
            result = probe.run(*tree_map(self._leaf, arguments))
        probe.watch.take()
        self.outputs = [
            leaf if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in tree_leaves(result)
        ]
        self.gradients: Sequence[Tensor | None] = ()
        self.sketches: list[Sketch | None] = []
        self.stored: dict[Any, Any] = {}

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

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.clone()
        self._inputs.append(value.detach().requires_grad_())
        return self._inputs[-1].clone()  # The forward may change its arguments in place.


def _noise(output: Tensor | None) -> Tensor | None:
    """Return the gradient with which the backward of an output begins."""
    if output is None:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def _is_same_gradient(gradients: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of a tensor for the batch consists of, or is the sum of, the gradients for the parts."""
    expected, *of_parts = gradients
    present = [gradient for gradient in of_parts if gradient is not None]
    if not present or expected is None:
        return not present and expected is None
    has_rows = present[0].shape != expected.shape
    if has_rows and sum(map(len, present)) != len(expected):
        return True
    return is_near(torch.cat(present) if has_rows else sum(present), expected, _limit(expected.dtype))


def _is_same_sketch(sketches: Sequence[Sketch | None]) -> bool:
    """Whether the gradient of a parameter for the batch is the sum of the gradients for the parts."""
    expected, *of_parts = sketches
    present = [sketch.values for sketch in of_parts if sketch is not None]
    if not present or expected is None:
        return not present and expected is None
    # Rounding is relative to the largest element of the gradient.
    total, whole = (torch.cat([values, expected.largest]) for values in (torch.stack(present).sum(0), expected.values))
    return is_near(total, whole, _limit(expected.dtype))


def _limit(dtype: torch.dtype) -> float:
    is_low = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return _LOW_PRECISION if is_low else _LIMITS.get(dtype, _LOW_PRECISION)
