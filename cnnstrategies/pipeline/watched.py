"""Containers, variables and tensors that a forward may change, with their noted content."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.noted_state import Restorer
from cnnstrategies.pipeline.outside_variables import MISSING, Variables
from cnnstrategies.placed import ForeignTensor

# Tensors with more bytes are not copied unless they are buffers, so a forward must not change them in place.
_LARGEST_COPY = 1 << 20
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# What a forward has done.
#   set: it has given an attribute or a key of a dictionary a value
#   delete: it has deleted an attribute or a key
#   append: it has appended elements to a list
#   replace: it has replaced the elements of a list from an index on; the index is the last key of the path
#   values: it has changed a tensor in place
Kind = Literal["set", "delete", "append", "replace", "values"]


class StoredKey(NamedTuple):
    """Name of a value that a forward has changed. All ranks use the same keys, because all have the same modules.

    Attributes:
        kind: How the forward has changed it.
        path: Name of the module, and then the keys that lead from the module to the changed value, such as the name of
            an attribute and a key of a dictionary.
    """

    kind: Kind
    path: tuple[Any, ...]

    @property
    def is_outside(self) -> bool:
        """Whether the value is a global variable or an attribute of a class, or belongs to such a variable."""
        return any(isinstance(key, str) and (key == "class" or key.startswith("global")) for key in self.path[1:])

    def __str__(self) -> str:
        """Return the path as a user would write it."""
        name, *keys = self.path
        return ".".join(map(str, filter(lambda key: key not in ("", "_buffers"), (name, *keys))))


class Container:
    """A list, a dictionary or an object's dictionary of attributes, with its noted content.

    Args:
        path: See `StoredKey`.
        target: The list or dictionary.
        kind: The object's class, which may have default values of attributes.

    Attributes:
        is_module: Whether the object is a module.
    """

    def __init__(self, path: tuple[Any, ...], target: Any, kind: type | None = None) -> None:
        self.path, self.target, self._kind = path, target, kind
        self.is_module = kind is not None and issubclass(kind, nn.Module)
        self._keys = list(target)
        self._values = list(target.values()) if isinstance(target, dict) else self._keys

    def has_changed(self) -> bool:
        """Whether the content is not the noted content."""
        target, values = self.target, self._values
        if len(target) != len(values):
            return True
        if isinstance(target, dict):
            return not all(map(is_, target.values(), values)) or list(target) != self._keys
        return not all(map(is_, target, values))

    def renewed(self) -> "Container | None":
        """Return a record of the present content; None if it differs in more than numbers and texts of a dictionary."""
        if not self.has_changed():
            return self
        target = self.target
        if not isinstance(target, dict) or list(target) != self._keys:
            return None
        pairs = zip(target.values(), self._values, strict=True)
        if all(new is old or (isinstance(old, PLAIN) and isinstance(new, PLAIN)) for new, old in pairs):
            return Container(self.path, target, self._kind)
        return None

    def take(self, stored: dict[StoredKey, Any], before: dict[StoredKey, Any]) -> None:
        """Move the changes into a dictionary, and restore the noted content."""
        target = self.target
        if isinstance(target, dict):
            noted = dict(zip(self._keys, self._values, strict=True))
            for name, value in target.items():
                default = None if self._kind is None else getattr(self._kind, str(name), None)
                old = noted.get(name, default)
                if name not in noted or (old is not value and not is_equal(old, value)):
                    key = StoredKey("set", (*self.path, name))
                    stored[key], before[key] = value, old
            for name in noted:
                if name not in target:
                    stored[StoredKey("delete", (*self.path, name))] = None
            _fill(target, noted)
            return
        content = list(target)
        kept = 0
        while kept < min(len(content), len(self._values)) and content[kept] is self._values[kept]:
            kept += 1
        if kept == len(self._values):
            stored[StoredKey("append", self.path)] = content[kept:]
        elif not is_equal(content, self._values):
            stored[StoredKey("replace", (*self.path, kept))] = content[kept:]
        _fill(target, self._values)

    def restorer(self) -> Restorer:
        """Return a function that restores the noted content, also after the content has changed."""
        return self._restore

    def _restore(self) -> Callable[[], None] | None:
        if not self.has_changed():
            return None
        target, is_dict = self.target, isinstance(self.target, dict)
        present = dict(target.items()) if is_dict else list(target)
        _fill(target, dict(zip(self._keys, self._values, strict=True)) if is_dict else self._values)
        return partial(_fill, target, present)


class WatchedVariables:
    """Variables outside of objects, with their noted values.

    Args:
        path: See `StoredKey`.
        variables: The variables.
    """

    def __init__(self, path: tuple[Any, ...], variables: Variables) -> None:
        self.path, self.target = path, variables
        self._values = variables.values()

    def has_changed(self) -> bool:
        """Whether the values are not the noted values."""
        return not all(map(is_, self.target.values(), self._values))

    def renewed(self) -> "WatchedVariables | None":
        """Return this record; None if the values have changed."""
        return None if self.has_changed() else self

    def take(self, stored: dict[StoredKey, Any], before: dict[StoredKey, Any]) -> None:
        """Move the changes into a dictionary, and restore the noted values."""
        for name, value, old in zip(self.target.names, self.target.values(), self._values, strict=True):
            if value is old:
                continue
            key = StoredKey("set" if value is not MISSING else "delete", (*self.path, name))
            if value is MISSING or old is MISSING or not is_equal(old, value):
                stored[key], before[key] = None if value is MISSING else value, None if old is MISSING else old
            self.target.put(name, old)

    def restorer(self) -> Restorer:
        """Return a function that restores the noted values, also after they have changed."""
        return self._restore

    def _restore(self) -> Callable[[], None] | None:
        return self._fill(self._values) if self.has_changed() else None

    def _fill(self, values: Sequence[Any]) -> Callable[[], None]:
        """Set the variables, and return a function that undoes this."""
        present = self.target.values()
        for name, value in zip(self.target.names, values, strict=True):
            self.target.put(name, value)

        def undo() -> None:
            self._fill(present)

        return undo


class WatchedTensor:
    """A tensor that a forward may change in place, such as a buffer."""

    def __init__(self, path: tuple[Any, ...], tensor: Tensor) -> None:
        self.path, self.target = path, tensor
        self._is_copied = "_buffers" in path[:2] or tensor.nbytes <= _LARGEST_COPY
        self._version = -1
        self._copy: Tensor | None = None

    def has_changed(self) -> bool:
        """Whether the tensor has been changed in place."""
        return writes(self.target) != self._version

    def refresh(self) -> None:
        """Note the current values."""
        if self.has_changed():
            self._version = writes(self.target)
            self._copy = self.target.detach().clone() if self._is_copied else None

    def take(self, stored: dict[StoredKey, Any], before: dict[StoredKey, Any]) -> None:
        """Move the tensor's values into a dictionary, and restore the noted values."""
        key = StoredKey("values", self.path)
        if self._copy is None:
            raise ConfigurationError(
                f"the network's forward changes {key} in place, a tensor of {self.target.nbytes} bytes that is not a "
                "buffer: register it as a buffer, or change it in the module's step"
            )
        stored[key] = self.target.clone()
        before[key] = self._copy
        if self.target.grad_fn is not None:
            self.target.detach_()
        self._put(torch.empty_like(self._copy))
        with torch.no_grad():
            # This increases the tensor's version, so that a graph that has saved the tensor itself fails.
            self.target.copy_(self._copy)
        self._version = writes(self.target)

    def restorer(self) -> Restorer:
        """Return a function that restores the values that are noted at present.

        If the tensor is too large for a copy, the function raises a ConfigurationError if the values have changed.
        """
        return partial(self._restore, self._copy, self._version)

    def _restore(self, values: Tensor | None, version: int) -> Callable[[], None] | None:
        if values is None and writes(self.target) != version:
            raise ConfigurationError(
                f"{StoredKey('values', self.path)} was changed in place after the network's forward, which has to run "
                "again for the backward: change the tensor after the backward, or register it as a buffer"
            )
        if values is None or (values is self._copy and not self.has_changed()):
            return None
        present = self.target.detach()
        self._put(values.clone())
        self._copy, self._version = values, writes(self.target)

        def undo() -> None:
            self._put(present)
            self._version = -1  # The values must be noted again.

        return undo

    def _put(self, values: Tensor) -> None:
        """Give the tensor another storage. The present values may be needed again.

        The storage's attributes tell where the tensor's copies are.
        """
        attributes = vars(self.target.untyped_storage())
        self.target.data = values
        vars(self.target.untyped_storage()).update(attributes)


def is_watched(tensor: Tensor) -> bool:
    """Whether in-place changes of a tensor are noticed: not those of parameters and of other ranks' tensors."""
    if isinstance(tensor, (nn.Parameter, ForeignTensor)) or tensor.is_meta or tensor.is_inference():
        return False
    return tensor.layout is torch.strided


def is_equal(value: Any, other: Any) -> bool:
    """Whether two values without tensors are equal. Tensors are equal if they are the same object."""
    if type(value) is not type(other):
        return False
    if isinstance(value, float):
        return repr(value) == repr(other)  # Not-a-number does not equal itself.
    if isinstance(value, PLAIN):
        return bool(value == other)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(is_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(is_equal(value[key], other[key]) for key in value)
    return value is other


def _fill(target: Any, content: Any) -> None:
    """Replace the content of a list or dictionary."""
    target.clear()
    if isinstance(target, dict):
        target.update(content)
    else:
        target.extend(content)
