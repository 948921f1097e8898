"""Find what a forward stores on modules, undo it, and store other values in the same places.

A network's forward, or a hook of one of its modules, may store values that the user's code reads later: a penalty in an
attribute, activations in a list that is a global variable, a count. A stage's forward runs once for each microbatch,
but the user's code has to find what one forward of the whole batch would have stored. :class:`StoredWatch` therefore
takes the values away after each microbatch.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import hook_tables
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import is_batch_norm
from cnnstrategies.pipeline.noted_contents import NotedContents
from cnnstrategies.pipeline.noted_state import NotedState
from cnnstrategies.pipeline.outside_variables import (
    MISSING,
    Variables,
    is_library,
    slots_of,
    used_by_class,
    used_by_function,
)
from cnnstrategies.pipeline.saved_copies import saving_copies
from cnnstrategies.pipeline.watched import (
    PLAIN,
    Container,
    StoredKey,
    WatchedTensor,
    WatchedVariables,
    is_watched,
)
from cnnstrategies.placed import ForeignTensor

# Attributes in which torch keeps a module's parameters, submodules and settings.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers"}
# Attributes in which torch keeps functions of the user that a forward calls, and a module's submodules.
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
# Objects whose classes belong to these packages are not searched: they refer to the rest of the program.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "builtins", "logging"})
# Number of objects, lists, dictionaries and functions between a module and a container that is searched.
_DEPTH = 4
# Containers with more elements are not searched. A forward that changes such a container is not noticed, unless the
# number of elements changes.
_LARGE = 1000


class WatchState:
    """An object that stays the same as long as the network's modules have the same hooks and submodules.

    They then also have the same attributes, except for numbers and texts.
    """


class StoredWatch:
    """Finds what forwards store on modules, in objects that modules refer to, and in variables of functions.

    Among these variables are global variables and attributes of classes that the code of the network's modules names.

    Args:
        owner: The user's module, or the network.
        network: The network, or None if it is the owner.
    """

    def __init__(self, owner: nn.Module, network: nn.Module | None = None) -> None:
        self._owner = owner
        self._network = owner if network is None else network
        self._records: list[_ModuleState] = []
        self._changeable: list[_ModuleState] = []  # Modules whose attributes change between calls.
        # What belongs to all other modules, and what belongs to the changeable ones in the current call.
        self._fixed = self._others = _NotedRecords([])
        self._state = WatchState()
        self._tensors: WeakValueDictionary[int, WatchedTensor] = WeakValueDictionary()
        self._changing: set[tuple[Any, ...]] = set()  # Paths of tensors that forwards have changed in place.
        self.before: dict[StoredKey, Any] = {}
        self.modules: list[nn.Module] = []
        self._hook_tables: list[dict[int, Any]] = []

    def begin(self) -> "WatchState":
        """Note the current state, and return :attr:`state`. Later calls of :meth:`take` return to this state."""
        if self._records and self._fixed.containers_hold:
            for tensor in self._fixed.tensors:
                tensor.refresh()
            changed = [record for record in self._changeable if record.refresh()]
            if any(record.is_divided for record in changed):
                self._state = WatchState()
            self._others = _NotedRecords(self._changeable)
            return self._state
        if not self._records or any(r.has_other_modules() or r.has_other_parameters() for r in self._records):
            self.modules = list(self._network.modules())
            self._hook_tables = [table for module in self.modules for table in hook_tables(module)]
            tree = {id(module) for module in self._owner.modules()}
            divided = set(map(id, self.modules))
            searched: set[type] = set()
            self._records, self._changeable = [], []
            for name, module in self._owner.named_modules():
                # All modules of a class have the same variables.
                kind = type(module)
                is_new = id(module) in divided and kind not in searched and not is_library(kind.__module__)
                searched.add(kind)
                is_divided = id(module) in divided
                self._records.append(_ModuleState(name, module, tree, self._tensors, is_new, is_divided))
        else:
            known = {*map(id, self._changeable)}
            self._changeable += [r for r in self._records if id(r) not in known and r.has_changed()]
            for record in self._records:
                record.refresh()
        changeable = {*map(id, self._changeable)}
        fixed = [record for record in self._records if id(record) not in changeable]
        attributes = [vars(record.module) for record in self._records]
        tables = [of_module[name] for of_module in attributes for name in _TABLES]
        self._fixed = _NotedRecords(fixed, tables, [of_module["_parameters"] for of_module in attributes])
        self._others, self._state = _NotedRecords(self._changeable), WatchState()
        return self._state

    def has_changed(self) -> bool:
        """Whether something has changed since :meth:`begin`."""
        return self._fixed.have_changed or self._others.have_changed

    @property
    def state(self) -> "WatchState":
        """The object that :meth:`begin` has returned, or a new one if something has changed since."""
        return WatchState() if self.has_changed() else self._state

    def take(self) -> dict[StoredKey, Any]:
        """Return what has been stored since :meth:`begin`, and undo it.

        Tensors that have been stored are connected to their autograd graph. Until the next call, ``before`` has the
        values from before for keys of the kinds ``set`` and ``values``; None if there was no value.
        """
        stored: dict[StoredKey, Any] = {}
        self.before = {}
        if not self.has_changed():
            return stored
        seen: set[int] = set()
        for record in self._records:
            if record.has_changed():
                record.take(stored, self.before, seen)
        for key, value in self.before.items():
            if any(isinstance(leaf, ForeignTensor) for leaf in tree_leaves(value)):
                self.before[key] = None  # Another stage has stored the value in an earlier step.
        self._changing |= {key.path for key in stored if key.kind == "values"}
        return stored

    def new_modules(self) -> str | None:
        """Return an error message if a forward has created modules or parameters since :meth:`begin`, or None."""
        for record in () if self._fixed.containers_hold else self._records:
            if record.has_other_modules() or record.has_other_parameters():
                return (
                    f"the network's forward has created a submodule or parameter of {record.name or 'the module'} "
                    f"({type(record.module).__name__}), which exists only on the ranks that run this forward: create "
                    "it in __init__, or call the network once in __init__"
                )
        return None

    def saving_copies(self, of_all: bool) -> AbstractContextManager[object]:
        """Return a context for a forward, in which autograd saves copies of tensors that the forward changes in place.

        Args:
            of_all: Whether autograd saves copies of all watched tensors, because it is not known which of them the
                forward changes.
        """
        tensors = [tensor for record in self._records for tensor in record.tensors] if of_all or self._changing else []
        return saving_copies(tensor.target for tensor in tensors if of_all or tensor.path in self._changing)

    def noted(self) -> NotedState:
        """Return the state that :meth:`begin` has noted."""
        watched: list[Container | WatchedVariables | WatchedTensor] = []
        for record in self._records:
            watched += [*record.containers, *record.tensors]
        return NotedState(watched, self._hook_tables, self._changing)

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
            if isinstance(target, Variables):
                target.put(last, MISSING if key.kind == "delete" else value)
                return
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
    """The state of one module, and of the containers and tensors that can be reached from its attributes.

    Args:
        name: Name of the module.
        module: The module.
        tree: Ids of all modules that have a state of their own.
        tensors: Watched tensors by id. The object adds tensors.
        has_class: Whether variables that the code of the module's class names also belong to the state.
        is_divided: Whether the module belongs to the network.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tree: set[int],
        tensors: "WeakValueDictionary[int, WatchedTensor]",
        has_class: bool,
        is_divided: bool,
    ) -> None:
        self.name, self.module, self._tree, self._known, self._has_class = name, module, tree, tensors, has_class
        self.is_divided = is_divided
        self._modules = list(vars(module)["_modules"].values())
        self._parameters = len(vars(module)["_parameters"])
        self.containers: list[Container | WatchedVariables] = []
        self.tensors: list[WatchedTensor] = []
        self._search()

    def has_other_modules(self) -> bool:
        """Whether the module's submodules have changed."""
        now = vars(self.module)["_modules"]
        return len(now) != len(self._modules) or not all(map(is_, now.values(), self._modules))

    def has_other_parameters(self) -> bool:
        """Whether the number of the module's own parameters has changed."""
        return len(vars(self.module)["_parameters"]) != self._parameters

    def has_changed(self) -> bool:
        """Whether a container or a tensor has changed."""
        return any(container.has_changed() for container in self.containers) or any(
            tensor.has_changed() for tensor in self.tensors
        )

    def refresh(self) -> bool:
        """Note the current state. Return whether more may have changed than numbers and texts in attributes."""
        has_other_hooks = _hooks_of(self.module) != self._hooks
        if not has_other_hooks and not self.has_changed():
            return False
        containers = [container.renewed() for container in self.containers]
        if has_other_hooks or None in containers or any(tensor.has_changed() for tensor in self.tensors):
            self._search()
            return True
        # `NotedState` needs the old records.
        self.containers = [container for container in containers if container is not None]
        return False

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
            if isinstance(value, Variables):
                self.containers.append(WatchedVariables(path, value))
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
            is_recorded = is_batch_norm(module) and module.track_running_stats
            for key, value in vars(module).items():
                if key in _TABLES:
                    for name, child in _held(value):
                        search(child, (*path, key, name), depth)
                elif key not in _OF_TORCH and not (key == "_buffers" and is_recorded):
                    search(value, (*path, key), depth)

        search_module(self.module, (self.name,), 0)
        if self._has_class:
            search(type(self.module), (self.name, "class"), 0)
        del before  # Until here, the records of tensors that are still there were kept.


class _NotedRecords:
    """What belongs to some modules, for comparisons without a loop over the modules.

    Args:
        records: The states of the modules.
        tables: Other dictionaries whose contents count.
        sizes: Other dictionaries whose sizes count.

    Attributes:
        tensors: The modules' watched tensors.
    """

    def __init__(
        self,
        records: Sequence[_ModuleState],
        tables: Sequence[dict[Any, Any]] = (),
        sizes: Sequence[dict[Any, Any]] = (),
    ) -> None:
        containers = [container for record in records for container in record.containers]
        self._variables = [container for container in containers if isinstance(container, WatchedVariables)]
        content = [container.target for container in containers if isinstance(container, Container)]
        self._contents = NotedContents([*content, *tables], sizes)
        self.tensors = [tensor for record in records for tensor in record.tensors]

    @property
    def containers_hold(self) -> bool:
        """Whether the contents of containers, and the variables, are the noted ones."""
        return self._contents.hold and not any(variables.has_changed() for variables in self._variables)

    @property
    def have_changed(self) -> bool:
        """Whether a container, a variable or a tensor has changed."""
        return not self.containers_hold or any(tensor.has_changed() for tensor in self.tensors)


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module that run in a forward or a backward."""
    return [hook for name in _TABLES if name != "_modules" for hook in vars(module)[name].values()]


def _is_searched(value: Any) -> bool:
    if isinstance(value, (nn.Module, dict, list, tuple, deque, FunctionType, MethodType, partial)):
        return True
    if isinstance(value, type):
        return not is_library(value.__module__)
    return (hasattr(value, "__dict__") or hasattr(value, "__slots__")) and type(value).__module__.split(".")[0] not in (
        *_LIBRARIES,
        "cnnstrategies",
    )


def _content(value: Any) -> Any:
    """Return the container of which a value consists, if it can be changed."""
    if isinstance(value, (dict, list, deque)):
        return value
    if isinstance(value, (tuple, FunctionType, MethodType, partial, type)):
        return None
    return getattr(value, "__dict__", None)


def _held(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values that a value refers to, each with a key that is the same on all ranks."""
    match value:
        case nn.Module():
            yield from (*vars(value).items(), ("class", type(value)))
        case FunctionType():
            yield from used_by_function(value)
        case type():
            yield from used_by_class(value)
        case Variables():
            yield from value.items()
        case MethodType():
            yield from (("self", value.__self__), ("func", value.__func__))
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
            yield from (*getattr(value, "__dict__", {}).items(), ("class", type(value)))
            if (slots := slots_of(value)) is not None:
                yield from (("slots", slots), *slots.items())
