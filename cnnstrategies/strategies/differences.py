"""Texts for the start panel and ``verify``: how a run on several processes differs from a run on one device."""

import ast
import inspect
import textwrap
from collections.abc import Iterator

from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies.pipeline.buffers import has_batch_norm

RANK_ZERO = "those of rank 0"
OWN_MEANS = (
    "a loss that is not a mean over images (class weights, ignore_index, Dice, pairs of images) is computed over each "
    "process's own images"
)
OWN_OTHER_LOSSES = (
    "a loss that is neither a mean over images nor a mean with a known divisor (Dice, pairs of images) is computed "
    "over each process's own images"
)
RANDOM_DRAWS = "random draws (as in dropout) are each process's own"


def has_mean_loss(module: nn.Module) -> bool:
    """Return whether a module has a method ``loss_weight(targets)`` that fits its method ``loss``.

    The method ``loss(outputs, targets)`` returns a mean, and ``loss_weight`` returns the divisor of this mean. If a
    subclass overrides only ``loss``, the inherited ``loss_weight`` may not fit, so the result is False. A module may
    also say itself by what its loss divides, in its attribute ``loss_divisor``: ``samples``, ``own`` for the number
    that ``loss_weight`` returns after the step, or ``unknown``.
    """
    if (divisor := getattr(module, "loss_divisor", None)) is not None:
        return bool(divisor != "unknown")
    for kind in type(module).__mro__:
        if "loss_weight" in vars(kind):
            return callable(getattr(module, "loss", None))
        if "loss" in vars(kind):
            return False
    return False


def differences_of_replicas(
    network: nn.Module,
    processes: int,
    batch_size: int | None,
    statistics: str,
    weighted: bool = False,
    owner: str = "process",
) -> list[str]:
    """Return one line of text for each way in which data parallelism differs from a run on one device.

    Args:
        network: The network, or the module that contains it.
        processes: Number of processes. Each process trains the whole network on its part of the global batch.
        batch_size: Number of samples in a batch of one process; None if the number is not known.
        statistics: End of the sentence "BatchNorm's running statistics are ...", such as `RANK_ZERO`.
        weighted: Whether ``SampleWeights`` weights the means in a loss by their divisors.
        owner: Name for what trains the whole network on a part of the batch: a process, or a group of processes.
    """
    if processes == 1:
        return []
    own_loss = isinstance(network, LightningModule) and not has_mean_loss(network)
    rest = [OWN_OTHER_LOSSES if weighted else OWN_MEANS] if own_loss else []
    if callable(further := getattr(network, "differences_of_parts", None)):
        rest += further(weighted)
    rest.append(RANDOM_DRAWS)
    updated = updated_buffers(network)
    if updated:
        rest.append(
            f"buffers that layers update from each process's own images ({', '.join(updated)}) are {statistics}"
        )
    if has_batch_norm(network):
        images = "own images" if batch_size is None else f"{batch_size} image{'' if batch_size == 1 else 's'}"
        rest[:0] = [
            f"BatchNorm normalises over each process's {images}",
            f"BatchNorm's running statistics are {statistics}",
        ]
    return [line.replace("each process's", f"each {owner}'s") for line in rest]


KNOWN_PACKAGES = ("torch.", "torchmetrics.", "lightning.", "cnnstrategies.")
# Beginnings of the names of methods that do not belong to a training step.
SET_UP = ("__init__", "__setstate__", "reset", "_load", "load", "_init", "init")


def updated_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers that layers of the user update, such as ``Codebook.means``.

    Only buffers of a floating-point dtype count: integers usually are counters, which are equal on all processes.

    The source text of the layers' classes shows which buffers are updated: a method assigns to the buffer or to a part
    of the buffer, or calls one of the buffer's in-place methods. Classes without a source text are left out.

    Args:
        module: The module that contains the layers.
    """
    names: dict[str, None] = {}
    for layer in module.modules():
        buffers = {name for name, buffer in layer.named_buffers(recurse=False) if buffer.is_floating_point()}
        for kind in type(layer).__mro__ if buffers else ():
            if not f"{kind.__module__}.".startswith(KNOWN_PACKAGES) and issubclass(kind, nn.Module):
                updated = {name for name in _written_attributes(kind) if name in buffers}
                names |= dict.fromkeys(f"{type(layer).__name__}.{name}" for name in sorted(updated))
    return list(names)


def _written_attributes(kind: type) -> Iterator[str]:
    """Yield the names of the attributes of ``self`` that the methods of a class write after its set-up."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef) and not method.name.startswith(SET_UP):
            for node in ast.walk(method):
                for target in _targets(node):
                    name = _attribute_of_self(target)
                    if name is not None:
                        yield name


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement or a call writes."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        if method.endswith("_") and not method.endswith("__"):
            yield node.func.value


def _attribute_of_self(node: ast.expr) -> str | None:
    """Return "mean" for `self.mean`, `self.mean[0]` and `self.mean.data.mul_(...)`; None for other expressions."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    return None
