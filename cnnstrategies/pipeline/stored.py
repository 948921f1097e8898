"""Find what a forward stores on modules, undo it, and store other values in the same places.

A network's forward, or a hook of one of its modules, may store values that the user's code reads later: a penalty in an
attribute, activations in a list, a count. A stage's forward runs once for each microbatch, but the user's code has to
find what one forward of the whole batch would have stored. :class:`StoredWatch` therefore takes the values away after
each microbatch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import writes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import BATCH_NORMS
from cnnstrategies.pipeline.noted_state import NotedState, Restorer
from cnnstrategies.pipeline.saved_copies import saving_copies
from cnnstrategies.placed import ForeignTensor

# Attributes in which torch keeps a module's parameters, submodules and settings.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers"}
# Attributes in which torch keeps functions of the user that a forward calls, and a module's submodules.
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_modules")
# Objects whose classes belong to these packages are not searched: they refer to the rest of the program.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "builtins", "logging"})
# Number of objects, lists, dictionaries and functions between a module and a container that is searched.
_DEPTH = 4
# Containers with more elements are not searched. A forward that changes such a container is not noticed, unless the
# number of elements changes.
_LARGE = 1000
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

    def __str__(self) -> str:
        """Return the path as a user would write it."""
        name, *keys = self.path
        return ".".join(map(str, filter(lambda key: key not in ("", "_buffers"), (name, *keys))))


class StoredWatch:
    """Finds what forwards store on modules, in the objects that modules refer to, and in variables of hooks.

    Args:
        owner: The user's module, or the network.
        network: The network, or None if it is the owner.
    """

    def __init__(self, owner: nn.Module, network: nn.Module | None = None) -> None:
        self._owner = owner
        self._network = owner if network is None else network
        self._records: list[_ModuleState] = []
        self._tensors: WeakValueDictionary[int, WatchedTensor] = WeakValueDictionary()
        self._changing: set[tuple[Any, ...]] = set()  # Paths of tensors that forwards have changed in place.
        self.before: dict[StoredKey, Any] = {}
        self.modules: list[nn.Module] = []

    def begin(self) -> None:
        """Note the current state. Later calls of :meth:`take` return to this state."""
        if not self._records or any(record.has_other_modules() for record in self._records):
            self.modules = list(self._network.modules())
            tree = {id(module) for module in self._owner.modules()}
            named = self._owner.named_modules()
            self._records = [_ModuleState(name, module, tree, self._tensors) for name, module in named]
        else:
            for record in self._records:
                record.refresh()

    def take(self) -> dict[StoredKey, Any]:
        """Return what has been stored since :meth:`begin`, and undo it.

        Tensors that have been stored are connected to their autograd graph. Until the next call, ``before`` has the
        values from before for keys of the kinds ``set`` and ``values``; None if there was no value.
        """
        stored: dict[StoredKey, Any] = {}
        self.before = {}
        seen: set[int] = set()
        for record in self._records:
            if record.has_changed():
                record.take(stored, self.before, seen)
        self._changing |= {key.path for key in stored if key.kind == "values"}
        return stored

    def saving_copies(self, of_all: bool) -> AbstractContextManager[object]:
        """Return a context for a forward, in which autograd saves copies of tensors that the forward changes in place.

        Args:
            of_all: Whether autograd saves copies of all watched tensors, because it is not known which of them the
                forward changes.
        """
        tensors = [tensor for record in self._records for tensor in record.tensors]
        return saving_copies(tensor.target for tensor in tensors if of_all or tensor.path in self._changing)

    def noted(self) -> NotedState:
        """Return the state that :meth:`begin` has noted."""
        watched: list[Container | WatchedTensor] = []
        for record in self._records:
            watched += [*record.containers, *record.tensors]
        return NotedState(watched, self.modules, self._changing)

    def outside_network(self) -> list[nn.Module]:
        """Return the owner's modules that are not in the network."""
        inside = set(self._network.modules())
        return [module for module in self._owner.modules() if module not in inside]

    def put(self, key: StoredKey, value: Any) -> None:
        """Store a value, as a forward has done on this rank or on another one.

        Args:
            key: The key.
            value: The value; ignored if the key's kind is ``delete``.

        Raises:
            ConfigurationError: This rank's modules differ from those of the rank that has stored the value.
        """
        try:
            *path, last = key.path
            target: Any = self.find(key.path if key.kind == "append" else tuple(path))
            if isinstance(target, nn.Module) or not isinstance(target, (dict, list, deque)):
                target = vars(target)
            match key.kind:
                case "set":
                    target[last] = value
                case "delete":
                    target.pop(last, None)
                case "append":
                    target.extend(value)
                case "replace":
                    kept = list(target)[:last]
                    target.clear()
                    target.extend([*kept, *value])
                case "values":
                    target[last] = value
        except (LookupError, AttributeError) as error:
            raise ConfigurationError(
                f"a forward has stored a value in {key}, which this rank's module does not have: create the list, "
                "dictionary or object on all ranks"
            ) from error

    def change(self, key: StoredKey, value: Any) -> None:
        """Do what a forward on this rank has done. A tensor that was changed in place remains the same tensor."""
        if key.kind == "values":
            with torch.no_grad():
                self.find(key.path).copy_(value)
        else:
            self.put(key, value)

    def value(self, key: StoredKey) -> Any:
        """Return the present value of a key of the kind ``set`` or ``values``; None if there is no value."""
        try:
            return self.find(key.path)
        except (LookupError, AttributeError):
            return None

    def find(self, path: tuple[Any, ...]) -> Any:
        """Return the object to which a path leads."""
        value: Any = self._owner.get_submodule(path[0])
        for key in path[1:]:
            value = dict(_held(value))[key]
        return value


class _ModuleState:
    """The state of one module, and of the containers and tensors that can be reached from its attributes."""

    def __init__(
        self, name: str, module: nn.Module, tree: set[int], tensors: "WeakValueDictionary[int, WatchedTensor]"
    ) -> None:
        self.name, self.module, self._tree, self._known = name, module, tree, tensors
        self._modules = list(vars(module)["_modules"].values())
        self.containers: list[Container] = []
        self.tensors: list[WatchedTensor] = []
        self._search()

    def has_other_modules(self) -> bool:
        """Whether the module's submodules have changed."""
        now = vars(self.module)["_modules"]
        return len(now) != len(self._modules) or not all(map(is_, now.values(), self._modules))

    def has_changed(self) -> bool:
        """Whether a container or a tensor has changed."""
        return any(container.has_changed() for container in self.containers) or any(
            tensor.has_changed() for tensor in self.tensors
        )

    def refresh(self) -> None:
        """Note the current state."""
        if self.has_changed() or _hooks_of(self.module) != self._hooks:
            self._search()

    def take(self, stored: dict[StoredKey, Any], before: dict[StoredKey, Any], seen: set[int]) -> None:
        """Move what has been stored into a dictionary, and restore the noted state.

        Args:
            stored: The function adds values.
            before: The function adds the values from before.
            seen: Ids of containers and tensors whose changes are already known. The function adds ids.
        """
        for container in self.containers:
            if id(container.target) not in seen and container.has_changed():
                seen.add(id(container.target))
                container.take(stored, before)
        for tensor in self.tensors:
            if id(tensor.target) not in seen and tensor.has_changed():
                seen.add(id(tensor.target))
                tensor.take(stored, before)

    def _search(self) -> None:
        before, self.containers, self.tensors = self.tensors, [], []
        self._hooks = _hooks_of(self.module)
        seen: set[int] = set()

        def search(value: Any, path: tuple[Any, ...], depth: int) -> None:
            if value is None or isinstance(value, PLAIN) or id(value) in seen:
                return
            if isinstance(value, Tensor):
                seen.add(id(value))
                if is_watched(value):
                    tensor = self._known.setdefault(id(value), WatchedTensor(path, value))
                    tensor.refresh()
                    self.tensors.append(tensor)
                return
            if isinstance(value, nn.Module):
                # Modules of the tree have records of their own. Others may be in a list, for example.
                if id(value) not in self._tree and depth <= _DEPTH:
                    search_module(value, path, depth + 1)
                return
            if depth > _DEPTH or not _is_searched(value):
                return
            seen.add(id(value))
            target = _content(value)
            if target is not None:
                self.containers.append(Container(path, target, None if target is value else type(value)))
                if len(target) > _LARGE:
                    return
            for key, child in _held(value):
                search(child, (*path, key), depth + 1)

        def search_module(module: nn.Module, path: tuple[Any, ...], depth: int) -> None:
            seen.add(id(module))
            self.containers.append(Container(path, vars(module), type(module)))
            is_recorded = isinstance(module, BATCH_NORMS) and module.track_running_stats
            for key, value in vars(module).items():
                if key in _TABLES:
                    for name, child in _held(value):
                        search(child, (*path, key, name), depth)
                elif key not in _OF_TORCH and not (key == "_buffers" and is_recorded):
                    search(value, (*path, key), depth)

        search_module(self.module, (self.name,), 0)
        del before  # Until here, the records of tensors that are still there were kept.


class Container:
    """A list, a dictionary or an object's dictionary of attributes, with its noted content.

    Args:
        path: See `StoredKey`.
        target: The list or dictionary.
        kind: The object's class, which may have default values of attributes.
    """

    def __init__(self, path: tuple[Any, ...], target: Any, kind: type | None = None) -> None:
        self.path, self.target, self._kind = path, target, kind
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
        present = dict(target) if is_dict else list(target)
        _fill(target, dict(zip(self._keys, self._values, strict=True)) if is_dict else self._values)
        return partial(_fill, target, present)


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


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module that run in a forward."""
    attributes = vars(module)
    return [*attributes["_forward_hooks"].values(), *attributes["_forward_pre_hooks"].values()]


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


def _is_searched(value: Any) -> bool:
    if isinstance(value, (nn.Module, dict, list, tuple, deque, FunctionType, MethodType, partial)):
        return True
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in (*_LIBRARIES, "cnnstrategies")


def _fill(target: Any, content: Any) -> None:
    """Replace the content of a list or dictionary."""
    target.clear()
    if isinstance(target, dict):
        target.update(content)
    else:
        target.extend(content)


def _content(value: Any) -> Any:
    """Return the container of which a value consists, if it can be changed."""
    if isinstance(value, (dict, list, deque)):
        return value
    if isinstance(value, (tuple, FunctionType, MethodType, partial, type)):
        return None
    return vars(value)


def _held(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values that a value refers to, each with a key that is the same on all ranks."""
    match value:
        case nn.Module():
            yield from vars(value).items()
        case FunctionType():
            filled = (cell for cell in value.__closure__ or () if cell != CellType())
            yield from ((f"variable {index}", cell.cell_contents) for index, cell in enumerate(filled))
        case MethodType():
            yield "self", value.__self__
        case partial():
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        case dict() if value and all(isinstance(hook, (FunctionType, MethodType, partial)) for hook in value.values()):
            # Keys of hooks are numbers, which may differ between ranks.
            yield from enumerate(value.values())
        case dict():
            yield from value.items()
        case list() | tuple() | deque():
            yield from enumerate(value)
        case _:
            yield from vars(value).items()
