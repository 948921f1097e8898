"""Find out whether a stage's backward mixes samples, or stores values.

A hook of a module, or an autograd function of the user's, may change gradients in the backward. A hook that divides a
gradient by its norm, for example, gives a sample another gradient in another batch. The probe compares the gradients of
two samples with those of each of the two samples. It also finds hooks that store values in the backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import without_tensor_hooks
from cnnstrategies.pipeline.combining import is_near
from cnnstrategies.pipeline.mixing import Arguments, FixedDraws, MixingProbe, join, rows_of

# A gradient is a sum over many values, so rounding changes it more than a result of the forward.
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}
_LOW_PRECISION = 0.1


def reason_of_backward(probe: MixingProbe, arguments: Sequence[Arguments], samples: Sequence[int]) -> str | None:
    """Return why a stage must run the whole batch as one microbatch because of its backward; None if it need not.

    Args:
        probe: The probe of the stage's forward.
        arguments: The stage's arguments for some microbatches.
        samples: Number of samples of each of these microbatches; two or more in all.
    """
    if samples[0] > 1:
        first = arguments[0]
        whole = rows_of(first, samples[0], 0, 2)
        parts = [rows_of(first, samples[0], 0, 1), rows_of(first, samples[0], 1, 2)]
    else:
        parts = list(arguments[:2])
        whole = join(parts, samples[:2])
    with probe.fixed(has_backward=True):
        return _compare(probe, whole, parts)


def _compare(probe: MixingProbe, whole: Arguments, parts: Sequence[Arguments]) -> str | None:
    try:
        runs = [ProbedRun(probe, arguments) for arguments in (whole, *parts)]
        starts = [_starts(column) for column in zip(*(run.outputs for run in runs), strict=True)]
        for index, run in enumerate(runs):
            run.backward([start if start is None else start[index] for start in starts])
    except Exception as error:
        return f"its backward cannot run for parts of the batch ({type(error).__name__}: {error})"
    stored = next((key for run in runs for key in run.stored), None)
    if stored is not None:
        return f"a hook stores {stored} in the backward"
    is_low = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    for expected, *of_parts in zip(*(run.gradients for run in runs), strict=True):
        present = [gradient for gradient in of_parts if gradient is not None]
        if not present or expected is None:
            if present or expected is not None:
                return _MIXES
            continue
        limit = _LOW_PRECISION if is_low else _LIMITS.get(expected.dtype, _LOW_PRECISION)
        has_rows = present[0].shape != expected.shape
        if has_rows and sum(map(len, present)) != len(expected):
            continue
        if not is_near(torch.cat(present) if has_rows else sum(present), expected, limit):
            return _MIXES
    return None


_MIXES = "its backward (a hook, or an autograd function of its own) gives a sample another gradient in another batch"


class ProbedRun:
    """A forward and a backward of a stage.

    Attributes:
        outputs: Tensors of the stage's result; None for other values.
        gradients: Gradients of the stage's tensors and parameters, after :meth:`backward`.
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
        self.stored: dict[Any, Any] = {}

    def backward(self, starts: Sequence[Tensor | None]) -> None:
        """Compute the gradients of inputs and parameters from the gradients of the outputs."""
        parameters = self._probe.parameters()
        pairs = [(o, g) for o, g in zip(self.outputs, starts, strict=True) if o is not None and g is not None]
        inputs = [*self._inputs, *parameters]
        if pairs and inputs:
            outputs, begins = zip(*pairs, strict=True)
            with without_tensor_hooks(parameters):
                self.gradients = torch.autograd.grad(outputs, inputs, begins, allow_unused=True)
        self.stored = self._probe.watch.take()

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.clone()
        self._inputs.append(value.detach().requires_grad_())
        return self._inputs[-1].clone()  # The forward may change its arguments in place.


def _starts(outputs: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Return gradients of an output of the whole and of the parts, equal for equal rows; None without such rows."""
    whole, *parts = outputs
    if whole is None or not whole.ndim or any(part is None or part.shape[1:] != whole.shape[1:] for part in parts):
        return None
    counts = [len(part) for part in parts if part is not None]
    if sum(counts) != len(whole):
        return None
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(whole.shape, generator=generator).to(whole.device, whole.dtype)
    return [noise, *torch.split(noise, counts)]
