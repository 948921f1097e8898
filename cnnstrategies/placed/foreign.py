"""A tensor that other ranks have: class, shape, strides, dtype and device, without a storage."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import (
    NO_OWN_FUNCTIONS,
    allow_in_lists,
    mark_as_parameter,
    tensor_without_storage,
    without_functions,
)
from cnnstrategies.placed.messages import RefusedError


class Interpreter(Protocol):
    """A rank's rules for operations and reads, which `Places` implements."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules."""

    def everywhere(self, tensor: Tensor, why: str) -> Tensor:
        """Return a tensor's values on all ranks."""


class ForeignTensor(Tensor):
    """A tensor without a storage, in place of a tensor that only other ranks have.

    A foreign parameter is an instance of `torch.nn.Parameter` as well, because that class recognises its instances by
    an attribute.

    Attributes:
        place: Ranks that have the tensor.
        label: Name of the tensor, such as a parameter's name; views have the name of the tensor that they are views of.
        interpreter: The rules of the rank.
    """

    place: tuple[int, ...]
    label: str
    interpreter: Interpreter

    @staticmethod
    def create(
        interpreter: Interpreter,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        place: tuple[int, ...],
        label: str = "",
        requires_grad: bool = False,
    ) -> "ForeignTensor":
        """Create a foreign tensor from its metadata."""
        tensor: ForeignTensor = tensor_without_storage(ForeignTensor, shape, stride, dtype, device, requires_grad)
        tensor.place, tensor.label, tensor.interpreter = place, label, interpreter
        return tensor

    def twin(self, label: str, requires_grad: bool = False) -> "ForeignTensor":
        """Return a new foreign tensor with the same metadata and place."""
        return ForeignTensor.create(
            self.interpreter,
            self.shape,
            self.stride(),
            self.dtype,
            self.device,
            self.place,
            label,
            requires_grad,
        )

    __torch_function__ = NO_OWN_FUNCTIONS  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation by the rules, if no mode is on."""
        with without_functions():
            return _interpreter(args, kwargs or {}).run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the metadata and the place. Only the other ranks can print the values."""
        name = f"{self.label}, " if self.label else ""
        return f"tensor({name}size={tuple(self.shape)}, dtype={self.dtype}, on ranks {list(self.place)})"

    def __format__(self, spec: str) -> str:
        """Format the value of a tensor without dimensions, as `Tensor.__format__` does on the ranks that have it."""
        if self.dim() == 0 and not isinstance(self, nn.Parameter):
            return str(self.item().__format__(spec))
        return object.__format__(self, spec)

    def __copy__(self) -> "ForeignTensor":
        """Return a foreign tensor with the same attributes."""
        return self._attributes_to(self.twin(self.label, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a foreign tensor with the same attributes.

        As in torch, the copy of a tensor has a copy of the gradient, and the copy of a parameter does not.
        """
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support deepcopy: call detach()"
            )
        # A copy has a storage of its own on other ranks, and therefore not the name of this tensor.
        copy = memo[id(self)] = self._attributes_to(self.twin("", self.requires_grad))
        if self.grad is not None and not isinstance(self, nn.Parameter):
            copy.grad = deepcopy(self.grad, memo)
        return copy

    def _attributes_to(self, copy: "ForeignTensor") -> "ForeignTensor":
        if isinstance(self, nn.Parameter):
            mark_as_parameter(copy)
        vars(copy).update({name: value for name, value in vars(self).items() if name not in vars(copy)})
        return copy

    # Functions that read the storage without an operation. On the ranks that have the tensor, `functions.Functions`
    # intercepts the same functions.

    def tolist(self) -> Any:
        """Return the values, which the place's first rank sends."""
        return self.interpreter.everywhere(self.detach(), "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array. The place's first rank sends them."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.interpreter.everywhere(self.detach(), "numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return the values as an array. The place's first rank sends them."""
        return self.interpreter.everywhere(self.detach(), "__array__").__array__(dtype)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        """Return the values for another library. The place's first rank sends them."""
        return self.interpreter.everywhere(self.detach(), "__dlpack__").__dlpack__(**options)

    def share_memory_(self) -> "ForeignTensor":
        """Return the tensor itself, because it has no memory to share. torch's own method would end the process."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, which the place's first rank sends."""
        values = self.interpreter.everywhere(self.detach(), "pickle")
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, self.requires_grad)
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RefusedError(
            f"access to the storage needs the values of {self!r}, which this rank does not have: use tensor.tolist() "
            "or tensor.numpy() on all ranks"
        )

    untyped_storage = storage = data_ptr = _refuse


# All ranks must use the same functions for lists. Otherwise ranks with foreign gradients would clip them one by one.
allow_in_lists(ForeignTensor)


def _interpreter(args: Any, kwargs: Any) -> Interpreter:
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, ForeignTensor):
                return tensor.interpreter
    raise AssertionError("torch has called the class of foreign tensors for an operation without a foreign tensor")
