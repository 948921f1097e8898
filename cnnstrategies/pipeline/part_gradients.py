"""Gradients of one microbatch, and their sums over the microbatches of a rank."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cnnstrategies._torch_private import add_all, reentrant_checkpoints


def add_gradients(sums: list[Tensor | None], gradients: Sequence[Tensor | None], summed: set[int]) -> None:
    """Add gradients to sums.

    Args:
        sums: The sums; None if there is no gradient yet.
        gradients: The gradients.
        summed: Indices of the sums that are new tensors, and not gradients that autograd has returned. These sums are
            changed in place, because new large tensors take time.
    """
    targets: list[Tensor] = []
    others: list[Tensor] = []
    for index, gradient in enumerate(gradients):
        present = sums[index]
        if gradient is None or present is None:
            sums[index] = gradient if present is None else present
        elif index in summed:
            targets.append(present)
            others.append(gradient)
        else:
            sums[index] = present + gradient
            summed.add(index)
    if targets:
        add_all(targets, others)


@contextmanager
def without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which ``grad`` of parameters is None at first. Afterwards ``grad`` is as before."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context without autocast. torch's own context takes 25 microseconds even where autocast is not on.

    Args:
        kind: Type of the device.
    """
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def gradients_of(
    roots: Sequence[Tensor], starts: Sequence[Tensor | None], inputs: Sequence[Tensor], keep: bool
) -> list[Tensor | None]:
    """Return the gradient of each input, from the gradients of results; None if there is no gradient.

    Gradients are dense, also those of ``nn.Embedding(sparse=True)``, because they are summed over replicas.

    Args:
        roots: Results of a microbatch's forward.
        starts: The gradient of each result; None if the loss does not depend on the result.
        inputs: Parameters and inputs.
        keep: Whether another backward through the same graph may follow.
    """
    pairs = [
        (root, start) for root, start in zip(roots, starts, strict=True) if root.requires_grad and start is not None
    ]
    wanted = [index for index, tensor in enumerate(inputs) if tensor.requires_grad]
    gradients: list[Tensor | None] = [None] * len(inputs)
    if pairs and wanted:
        ends, begins = zip(*pairs, strict=True)
        chosen = [inputs[index] for index in wanted]
        with reentrant_checkpoints():
            computed = torch.autograd.grad(ends, chosen, begins, retain_graph=keep, allow_unused=True)
        for index, gradient in zip(wanted, computed, strict=True):
            is_sparse = gradient is not None and gradient.layout is not torch.strided
            gradients[index] = gradient.to_dense() if is_sparse else gradient
    return gradients


def multiply_gradients(gradients: list[Tensor | None], factor: float | Tensor, keep: bool) -> list[Tensor | None]:
    """Return gradients times a factor, in the list itself, so that each old gradient is freed before the next.

    Args:
        gradients: The gradients.
        factor: The factor.
        keep: Whether the results are other tensors than the gradients. What happens to the results, such as their sum
            over replicas, must not change gradients that are kept.
    """
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if isinstance(factor, Tensor):
            # In 16 bits the factor itself would be rounded.
            wide = torch.promote_types(gradient.dtype, torch.float32)
            gradients[index] = gradient.to(wide).mul(factor).to(gradient.dtype)
        elif factor != 1:
            gradients[index] = gradient * factor
        elif keep:
            gradients[index] = gradient.clone()
    return gradients
