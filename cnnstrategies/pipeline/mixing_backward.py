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
# Largest difference between a gradient and the same gradient in a batch of another size, relative to the gradient, if
# rounding changes the signs of single values. A hook that divides a gradient by the size of the batch changes it more.
_ALIKE = 0.25
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
    of_inputs = list(zip(both.gradients, first.gradients, second.gradients, strict=True))
    of_parameters = list(zip(both.sketches, first.sketches, second.sketches, strict=True))
    if all(map(_is_same_gradient, of_inputs)) and all(map(_is_same_sketch, of_parameters)):
        return None
    # A kernel may round otherwise for another number of samples. A value near 0 then gets another sign, and a ReLU
    # another derivative there, so that few elements of a gradient differ by much. Among batches of the same size, a
    # sample's values are the same in each bit.
    is_alike = all(_is_alike(*gradients) for gradients in of_inputs) and all(
        _is_alike(*(sketch and sketch.values for sketch in sketches)) for sketches in of_parameters
    )
    return None if is_alike and _is_same_beside_others(runs, both, first) else _MIXES


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


def _chosen(arguments: Arguments, samples: int, rows: Sequence[int]) -> Arguments:
    """Return the arguments for a batch of samples with some numbers."""
    parts = [rows_of(arguments, samples, row, row + 1) for row in rows]

    def joined(whole: Any, *leaves: Any) -> Any:
        if isinstance(whole, Tensor) and whole is not leaves[0]:
            return torch.cat(leaves)
        return len(rows) if type(whole) is int and whole == samples else whole

    result: Arguments = tree_map(joined, arguments, *parts)
    return result


def _is_same_gradient(gradients: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of a tensor for the batch consists of, or is the sum of, the gradients for the parts."""
    expected, *of_parts = gradients
    present = [gradient for gradient in of_parts if gradient is not None]
    if not present or expected is None:
        return not present and expected is None
    joined = _joined(expected, present)
    return joined is None or is_near(joined, expected, _limit(expected.dtype))


def _joined(whole: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient of a tensor for a batch from those for parts of the batch; None if parts are missing."""
    if parts[0].shape == whole.shape:
        return torch.stack([*parts]).sum(0)
    return torch.cat([*parts]) if sum(map(len, parts)) == len(whole) else None


def _is_same_sketch(sketches: Sequence[Sketch | None]) -> bool:
    """Whether the gradient of a parameter for the batch is the sum of the gradients for the parts."""
    expected, *of_parts = sketches
    present = [sketch for sketch in of_parts if sketch is not None]
    if not present or expected is None:
        return not present and expected is None
    return _have_same_sum([expected], present)


def _have_same_sum(sketches: Sequence[Sketch], others: Sequence[Sketch]) -> bool:
    total, other = (torch.stack([sketch.values for sketch in column]).sum(0) for column in (sketches, others))
    limit, largest = _limit(sketches[0].dtype), sketches[0].largest
    if limit == _LOW_PRECISION:  # Terms of a sum may be much larger than the sum, and so is their rounding.
        return _is_alike(total, other)
    # Rounding is relative to the largest element of the gradient.
    return is_near(torch.cat([other, largest]), torch.cat([total, largest]), limit)


def _is_alike(expected: Tensor | None, *of_parts: Tensor | None) -> bool:
    """Whether most of a gradient's elements for the batch are those for the parts, up to rounding."""
    present = [gradient for gradient in of_parts if gradient is not None]
    if not present or expected is None:
        return not present and expected is None
    joined = _joined(expected, present)
    if joined is None:
        return True
    difference, size = (torch.linalg.vector_norm(value.double()) for value in (joined - expected, expected))
    return bool(difference <= _ALIKE * size)


def _is_same_beside_others(runs: _Runs, both: ProbedRun, single: ProbedRun) -> bool:
    """Whether the first two samples have the same gradients beside each other as beside themselves.

    Args:
        runs: Runs with other samples.
        both: Run of the two samples.
        single: Run of one sample.
    """
    first, second, swapped = runs.of(0, 0), runs.of(1, 1), runs.of(1, 0)
    of_inputs = zip(both.gradients, first.gradients, second.gradients, single.gradients, strict=True)
    for beside, of_first, of_second, of_one in of_inputs:
        if beside is None or of_first is None or of_second is None or of_one is None:
            continue  # The gradients' presence was compared before.
        if beside.shape != of_one.shape:
            rows = len(beside) // 2
            expected = torch.cat([of_first[:rows], of_second[rows:]])
            if not is_near(expected, beside, _limit(beside.dtype)):
                return False
    of_parameters = zip(both.sketches, swapped.sketches, first.sketches, second.sketches, strict=True)
    return all(
        None in sketches or _have_same_sum(sketches[:2], sketches[2:])  # type: ignore[arg-type]
        for sketches in of_parameters
    )


def _limit(dtype: torch.dtype) -> float:
    is_low = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return _LOW_PRECISION if is_low else _LIMITS.get(dtype, _LOW_PRECISION)
