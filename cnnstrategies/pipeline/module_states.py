"""The containers, variables and tensors of modules that a forward may change."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from cnnstrategies.pipeline.buffers import is_batch_norm
from cnnstrategies.pipeline.noted_contents import NotedContents
from cnnstrategies.pipeline.outside_variables import Variables, is_library, slots_of, used_by_class, used_by_function
from cnnstrategies.pipeline.watched import PLAIN, Container, StoredKey, WatchedTensor, WatchedVariables, is_watched

# Attributes in which torch keeps a module's parameters, submodules and settings.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers"}
# Attributes in which torch keeps functions of the user that a forward calls, and a module's submodules.
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
# Objects whose classes belong to these packages are not searched: they refer to the rest of the program.
_LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy", "builtins", "logging"})
# Number of objects, lists, dictionaries and functions between a module and a container that is searched.
_DEPTH = 4
# Containers with more elements are not searched. A forward that changes such a container is not noticed, unless the
# number of elements changes.
_LARGE = 1000


class ModuleState:
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
        has_other_hooks = hooks_of_calls(self.module) != self._hooks
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
        self._hooks = hooks_of_calls(self.module)
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
            for key, child in held(value):
                search(child, (*path, key), depth + 1)

        def search_module(module: nn.Module, path: tuple[Any, ...], depth: int) -> None:
            seen.add(id(module))
            self.containers.append(Container(path, vars(module), type(module)))
            is_recorded = is_batch_norm(module) and module.track_running_stats
            for key, value in vars(module).items():
                if key in TABLES:
                    for name, child in held(value):
                        search(child, (*path, key, name), depth)
                elif key not in _OF_TORCH and not (key == "_buffers" and is_recorded):
                    search(value, (*path, key), depth)

        search_module(self.module, (self.name,), 0)
        if self._has_class:
            search(type(self.module), (self.name, "class"), 0)
        del before  # Until here, the records of tensors that are still there were kept.


class NotedRecords:
    """The containers, variables and tensors of several modules, for comparisons without a loop over the modules.

    Args:
        records: The states of the modules.
        tables: Other dictionaries whose contents count.
        sizes: Other dictionaries whose sizes count.

    Attributes:
        tensors: The modules' watched tensors.
    """

    def __init__(
        self,
        records: Sequence[ModuleState],
        tables: Sequence[dict[Any, Any]] = (),
        sizes: Sequence[dict[Any, Any]] = (),
    ) -> None:
        containers = [container for record in records for container in record.containers]
        self._variables = [container for container in containers if isinstance(container, WatchedVariables)]
        content = [container for container in containers if isinstance(container, Container)]
        self._contents = NotedContents(
            [*(container.target for container in content if not container.is_module), *tables],
            sizes,
            [container.target for container in content if container.is_module],
        )
        self.tensors = [tensor for record in records for tensor in record.tensors]

    @property
    def containers_hold(self) -> bool:
        """Whether the contents of containers, and the variables, are the noted ones."""
        return self._contents.hold and not any(variables.has_changed() for variables in self._variables)

    @property
    def have_changed(self) -> bool:
        """Whether a container, a variable or a tensor has changed."""
        return not self.containers_hold or any(tensor.has_changed() for tensor in self.tensors)


def hooks_of_calls(module: nn.Module) -> list[Any]:
    """Return the hooks of a module that run in a forward or a backward."""
    return [hook for name in TABLES if name != "_modules" for hook in vars(module)[name].values()]


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


def held(value: Any) -> Iterator[tuple[Any, Any]]:
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
