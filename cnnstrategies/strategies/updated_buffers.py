"""Buffers that a user's layers update in ``forward``, such as the moving averages of a codebook."""

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn

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
