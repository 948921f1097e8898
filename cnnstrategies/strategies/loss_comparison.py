"""Comparison of a batch's loss with the losses of two parts of the batch, before ranks get unequal shares.

The comparison tells how the gradient of a batch follows from the gradients of the parts: whether the loss is a mean or
a sum over the samples. It runs the training step on a copy of the module, so that the module, its hooks, its logs and
the random number generators do not change. In the copy, batch normalisation uses its running statistics and dropout is
off, because otherwise the outputs for a sample would depend on the other samples.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.buffers import BATCH_NORMS
from cnnstrategies.recording.steps import loss_of
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.strategies.mean_terms import joined, mean_terms
from cnnstrategies.strategies.module_copies import (
    CollectiveError,
    NoCollectives,
    same_random_numbers,
    tensors_stay,
    trial_of,
)

# How the loss of a batch follows from the losses of its parts:
# "mean": the mean, weighted by the numbers of samples.
# "terms": the same, but each mean in the loss is weighted by its own divisor; see `mean_terms`.
# "sum": the sum.
# "neither": none of these.
# "unknown": the comparison was not possible.
LossKind = Literal["mean", "terms", "sum", "neither", "unknown"]
KINDS: tuple[LossKind, ...] = ("mean", "terms", "sum", "neither", "unknown")
# Largest difference between two gradients that are equal except for rounding, in proportion to their norm. A sum
# differs from a mean by at least half of the norm. Numbers of 16 bits are converted to float32.
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3}
FEWEST = 4  # Half of a batch is compared if it has this many samples.
COMPARED = 64  # Number of elements of each parameter's gradient that are compared.


class LossComparison(NamedTuple):
    """Result of a comparison.

    Attributes:
        kind: How the loss of a batch follows from the losses of its parts.
        reason: For the kind "unknown", a text that says why.
        terms: Number of means with divisors of their own in the loss.
    """

    kind: LossKind
    reason: str = ""
    terms: int = 0


class _DrawsError(Exception):
    """The step has drawn random numbers."""


def compare_with_parts(module: LightningModule, batch: Any, batch_idx: int) -> LossComparison:
    """Compare the gradient of a batch's training loss with the gradients of two parts of the batch.

    Half of a large batch stands for the batch.

    Args:
        module: The module, which must use automatic optimization.
        batch: The batch, on the module's device. All of its tensors that have a row for each sample are divided.
        batch_idx: Index of the batch.
    """
    samples = count_samples(batch)
    if samples == 0:
        return LossComparison("unknown", "the batch contains no tensor")
    if samples == 1:
        # The loss of a single sample and the loss of the sample and its copy show whether the loss is a sum.
        batch, samples = _repeated(batch), 2
    if samples >= 2 * FEWEST:
        # They show the same, and need less memory than a training step.
        batch, samples = _rows(batch, samples, slice(0, samples // 2)), samples // 2
    if is_compiled_whole(module) or any(is_compiled(child) for child in module.modules()):
        return LossComparison("unknown", "the module is compiled")
    if any(isinstance(child, BATCH_NORMS) and not child.track_running_stats for child in module.modules()):
        return LossComparison("unknown", "a BatchNorm layer has no running statistics")
    # Parts of different sizes show a loss that counts the parts, and not the samples, whenever there are three samples.
    first = max(1, samples // 3)
    for modes in (_hold_statistics, _evaluate):
        try:
            return _compare(partial(_run, module, batch, batch_idx, modes), samples, first)
        except _DrawsError:
            continue
        except CollectiveError as error:
            return LossComparison("unknown", f"the step calls a collective of torch.distributed ({error})")
        except Exception as error:
            text = " ".join(str(error).splitlines()[:1])
            return LossComparison("unknown", f"the step fails in a trial run: {type(error).__name__}: {text}")
    return LossComparison("unknown", "the step draws random numbers")


class _Gradients(NamedTuple):
    """Some elements of the gradients of a part of a batch.

    Attributes:
        plain: Elements of the gradients, on the CPU, in dtype float64.
        weighted: The same elements, if each mean in the loss is weighted by its divisor; None if the loss has no means
            with divisors of their own, or other means than the whole batch.
        divisors: The divisors of the means.
        dtypes: Dtypes of the parameters.
    """

    plain: Tensor
    weighted: Tensor | None
    divisors: Tensor
    dtypes: frozenset[torch.dtype]


def _compare(run: Callable[[slice, int, Tensor | None], _Gradients], samples: int, first: int) -> LossComparison:
    """Compare the gradient of a batch with the gradients of its first samples and of its other samples.

    Args:
        run: Function that returns the gradients of a slice of the batch; see :func:`_run`.
        samples: Number of samples in the batch.
        first: Number of samples in the first part.
    """
    whole = run(slice(0, samples), samples, None)
    size = float(whole.plain.norm())
    if not (size and isfinite(size)):
        return LossComparison("unknown", "the gradient of the first batch is zero or not finite")
    parts = [run(rows, samples, whole.divisors) for rows in (slice(0, first), slice(first, samples))]
    fractions = first / samples, 1 - first / samples
    allowed = max(ROUNDING[dtype] for dtype in whole.dtypes) * size

    def is_equal(*gradients: Tensor) -> bool:
        return bool((whole.plain - sum(gradients)).norm() <= allowed)

    weighted = [part.weighted for part in parts if part.weighted is not None]
    # The divisors of the parts do not add up to the divisor of the whole batch if a sum is divided by a constant.
    add_up = len(weighted) == len(parts) and torch.allclose(parts[0].divisors + parts[1].divisors, whole.divisors)
    if add_up and is_equal(*weighted):
        return LossComparison("terms", terms=len(whole.divisors))
    plain = [part.plain for part in parts]
    if is_equal(*(fraction * gradient for fraction, gradient in zip(fractions, plain, strict=True))):
        return LossComparison("mean")
    return LossComparison("sum" if is_equal(*plain) else "neither")


def _run(
    module: LightningModule,
    batch: Any,
    batch_idx: int,
    modes: Callable[[nn.Module], None],
    rows: slice,
    samples: int,
    whole: Tensor | None,
) -> _Gradients:
    """Run forward and backward for a part of a batch on a copy of a module.

    Args:
        module: The module.
        batch: The batch.
        batch_idx: Index of the batch.
        modes: Function that sets the layers of the copy to training or evaluation.
        rows: The part.
        samples: Number of samples in the batch.
        whole: The divisors of the means in the loss of the whole batch; None in the run for the whole batch.
    """
    copied = trial_of(module)
    modes(copied)
    if any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in copied.parameters()):
        copied.float()
        batch = tree_map(_widened, batch)
    vars(copied)["all_gather"] = _no_gathering
    arguments = [_rows(batch, samples, rows), batch_idx][: len(inspect.signature(copied.training_step).parameters)]
    device = module.device
    with same_random_numbers(device), torch.enable_grad(), tensors_stay(module), NoCollectives() as watch:
        before = GeneratorStates.current(device)
        with torch.autocast(device.type, enabled=False):
            try:
                output = copied.training_step(*arguments)
            except Exception:
                if watch.collective is None:
                    raise
        if watch.collective is not None:
            raise CollectiveError(watch.collective)
        if before.changed(GeneratorStates.current(device)):
            raise _DrawsError
        loss = loss_of(output)
        if not isinstance(loss, Tensor):
            raise TypeError(f"training_step returned {type(loss).__name__}")
        parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
        terms, weighted = mean_terms(loss), None
        plain = _gradient(loss, parameters, keep=bool(terms) and whole is not None)
        numbers = joined([term.divisor for term in terms], loss)
        if terms and whole is not None and len(terms) == len(whole):
            fraction = (rows.stop - rows.start) / samples
            for term, factor in zip(terms, numbers / whole / fraction, strict=True):
                term.scale(factor)
            weighted = fraction * _gradient(loss, parameters)
    return _Gradients(plain, weighted, numbers, frozenset(parameter.dtype for parameter in parameters))


def _gradient(loss: Tensor, parameters: Sequence[nn.Parameter], keep: bool = False) -> Tensor:
    """Return some elements of each parameter's gradient, as one tensor of dtype float64 on the CPU.

    Args:
        loss: The loss.
        parameters: The parameters.
        keep: Whether to keep the autograd graph for a second call.
    """
    some: dict[int, Tensor] = {}

    def hook(gradient: Tensor, index: int) -> Tensor:
        # The whole gradients would need as much memory as the parameters and their copies.
        some[index] = _some(parameters[index], gradient)
        return gradient if gradient.is_sparse else gradient.new_zeros(()).expand(gradient.shape)

    handles: list[Any] = [p.register_hook(partial(hook, index=index)) for index, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
    torch.autograd.grad(loss, parameters, retain_graph=keep, allow_unused=True)
    for handle in handles:
        handle.remove()
    return torch.cat([some.get(index, _some(p, None)) for index, p in enumerate(parameters)])


def _some(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return some elements of a parameter's gradient; zeros if the parameter has no gradient."""
    number = min(parameter.numel(), COMPARED)
    if gradient is None:
        return torch.zeros(number, dtype=torch.float64)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    numbers = torch.arange(number, device=dense.device) * max(1, dense.numel() // COMPARED)
    # A gradient may be a transposed matrix, of which `flatten` would make a copy.
    some = dense.flatten()[numbers] if dense.is_contiguous() else dense[torch.unravel_index(numbers, dense.shape)]
    return some.to("cpu", torch.float64)


def _hold_statistics(copied: nn.Module) -> None:
    """Evaluate the layers of a copy that normalise over a batch or drop values; leave other layers as they are.

    A layer without parameters and submodules may be a kind of dropout that torch does not know.
    """
    for child in copied.modules():
        plain = not any(True for _ in child.children()) and not any(True for _ in child.parameters())
        if plain or isinstance(child, (*BATCH_NORMS, nn.SyncBatchNorm)):
            child.training = False


def _evaluate(copied: nn.Module) -> None:
    """Evaluate all layers of a copy."""
    copied.eval()


def _rows(batch: Any, samples: int, rows: slice) -> Any:
    """Return some samples of a batch, as copies.

    Args:
        batch: The batch: tensors with a row for each sample, and lists with an entry for each sample, in containers.
        samples: Number of samples in the batch.
        rows: The samples to return.
    """
    if isinstance(batch, Tensor):
        return batch[rows].clone() if batch.ndim and len(batch) == samples else batch.clone()
    if isinstance(batch, list | tuple) and len(batch) == samples:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        # A batch of two samples may also be a list of two tensors, each with a row for each sample.
        if not tensors or any(leaf.ndim == 0 or len(leaf) != samples for leaf in tensors):
            return batch[rows]
    if isinstance(batch, Mapping | list | tuple):
        return tree_map(partial(_rows, samples=samples, rows=rows), batch, is_leaf=lambda value: value is not batch)
    return batch


def _widened(leaf: Any) -> Any:
    """Return a tensor of floating-point numbers in float32; return anything else as it is."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _repeated(batch: Any) -> Any:
    """Return a batch of two equal samples, from a batch of one sample."""

    def repeated(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == 1 else leaf

    return tree_map(repeated, batch)


def _no_gathering(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the step gathers the tensors of all ranks")
