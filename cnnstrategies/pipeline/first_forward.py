"""Parameters that a forward sets, as layers do that compute their first parameters from the first batch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import OperationMode
from cnnstrategies.placed import ForeignTensor
from cnnstrategies.placed.operations import operation_of

# Number of elements of which a checksum is computed at once.
CHUNK = 2**15
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotedParameters:
    """The parameters of a stage, with copies of those values that forwards change.

    Copies of all values would need as much memory as the stage. A value is therefore copied when an operation is about
    to change it. What no operation of torch changes, such as a write through NumPy, is found by checksums.

    Args:
        modules: The modules that the stage calls, by name, with their submodules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        parameters = {
            f"{path}.{name}": p for path, module in modules.items() for name, p in module.named_parameters("", False)
        }
        self._parameters = {
            name: p for name, p in parameters.items() if not p.is_meta and not isinstance(p, ForeignTensor)
        }
        # Tensors with the parameters' storages. They stay the same if a forward assigns to `parameter.data`.
        self._noted = {name: p.detach() for name, p in self._parameters.items()}
        self._writes = _Writes(self._noted)
        self._flags = [(p, p.requires_grad, p.grad) for p in self._parameters.values()]
        self._checksums = {name: _checksum(p) for name, p in self._noted.items()}

    def watching(self) -> AbstractContextManager[object]:
        """Return a context for a forward, in which values are copied before they change."""
        return self._writes

    def changed(self) -> list[str]:
        """Return the names of parameters whose values have changed, as far as operations of torch show it."""
        return [name for name, parameter in self._parameters.items() if self._has_changed(name, parameter)]

    def changed_unseen(self) -> str | None:
        """Return the name of a parameter that has changed although no operation of torch shows it; None without one."""
        names = [name for name in self._noted if name not in self._writes.copies]
        are_equal = [_checksum(self._noted[name]).eq(self._checksums[name]) for name in names]
        if not names or torch.stack([equal.cpu() for equal in are_equal]).all():
            return None
        return next(name for name, equal in zip(names, are_equal, strict=True) if not equal)

    def restore(self) -> None:
        """Give the parameters the noted values again, their gradients, and what says whether they need gradients."""
        for parameter, needs_gradient, gradient in self._flags:
            parameter.requires_grad_(needs_gradient)
            parameter.grad = gradient
        with torch.no_grad():
            for name in self.changed():
                parameter, noted = self._parameters[name], self._noted[name]
                if name in self._writes.copies:
                    noted.copy_(self._writes.copies[name])
                if parameter.data_ptr() != noted.data_ptr():
                    parameter.data = noted

    def tensors(self) -> list[Tensor]:
        """Return the parameters, without gradients, as tensors that share their storage."""
        return [parameter.detach() for parameter in self._parameters.values()]

    def _has_changed(self, name: str, parameter: Tensor) -> bool:
        noted = self._noted[name]
        if name not in self._writes.copies and parameter.data_ptr() == noted.data_ptr():
            return False
        value = self._writes.copies.get(name, noted)
        return not torch.equal(parameter.detach().nan_to_num(), value.nan_to_num())


class _Writes(OperationMode):  # type: ignore[no-untyped-call]
    """Copies tensors when an operation is about to write them, or views of them. Compiled functions run uncompiled.

    Args:
        tensors: The tensors, by name.

    Attributes:
        copies: Copies of the tensors that were written, or were about to be written, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors
        self._names: dict[int, list[str]] = {}  # Names of the tensors with a storage, by the storage's address.
        for name, tensor in tensors.items():
            if tensor.numel():
                self._names.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        self.copies: dict[str, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, after copies of what it writes."""
        kwargs = kwargs or {}
        for tensor in tree_leaves(operation_of(func).written_values(args, kwargs)):
            self._copy(tensor)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        if type(written) not in (Tensor, nn.Parameter) or written.is_meta:
            return
        for name in self._names.pop(written.untyped_storage().data_ptr(), ()):
            self.copies[name] = self._tensors[name].clone()


def _checksum(tensor: Tensor) -> Tensor:
    """Return a number that changes if an element changes, or if elements change places."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    # Reading the elements in the order of the memory needs no copy.
    dimensions = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(dimensions).reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(1, 2 * min(CHUNK, len(flat)) + 1, 2, device=tensor.device)
    for chunk in torch.split(flat, CHUNK):
        total = total * 31 + (weights[: len(chunk)] * chunk).sum()
    return total
