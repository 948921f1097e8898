"""Find what a forward stores on modules, undo it, and store other values in the same places.

A network's forward, or a hook of one of its modules, may store values that the user's code reads later: a penalty in an
attribute, activations in a list that is a global variable, a count. A stage's forward runs once for each microbatch,
but the user's code has to find what one forward of the whole batch would have stored. :class:`StoredWatch` therefore
takes the values away after each microbatch.
"""

from collections import deque
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import hook_tables
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.module_states import TABLES, ModuleState, NotedRecords, held
from cnnstrategies.pipeline.noted_state import NotedState
from cnnstrategies.pipeline.outside_variables import (
    MISSING,
    Variables,
    is_library,
)
from cnnstrategies.pipeline.saved_copies import saving_copies
from cnnstrategies.pipeline.watched import (
    Container,
    StoredKey,
    WatchedTensor,
    WatchedVariables,
)
from cnnstrategies.placed import ForeignTensor

# Number of states of the changeable modules that are remembered. BatchNorm layers have another momentum in forwards
# than in backwards, so their states alternate.
_KNOWN = 2


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
        self._records: list[ModuleState] = []
        self._changeable: list[ModuleState] = []  # Modules whose attributes change between calls.
        # What belongs to all other modules, and what belongs to the changeable ones in the current call.
        self._fixed = self._others = NotedRecords([])
        # What has been noted of the changeable modules, and their containers: the last one first.
        self._known: list[tuple[NotedRecords, list[list[Container | WatchedVariables]]]] = []
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
            if self.return_to_known():
                return self._state
            changed = [record for record in self._changeable if record.refresh()]
            if any(record.is_divided for record in changed):
                self._state = WatchState()
            if changed:
                self._known = []  # What is remembered must not keep other values than numbers and texts in memory.
            self._note_changeable()
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
                self._records.append(ModuleState(name, module, tree, self._tensors, is_new, is_divided))
        else:
            known = {*map(id, self._changeable)}
            self._changeable += [r for r in self._records if id(r) not in known and r.has_changed()]
            for record in self._records:
                record.refresh()
        changeable = {*map(id, self._changeable)}
        fixed = [record for record in self._records if id(record) not in changeable]
        attributes = [vars(record.module) for record in self._records]
        tables = [of_module[name] for of_module in attributes for name in TABLES]
        self._fixed = NotedRecords(fixed, tables, [of_module["_parameters"] for of_module in attributes])
        self._state, self._known = WatchState(), []
        self._note_changeable()
        return self._state

    def _note_changeable(self) -> None:
        """Remember the noted contents of the changeable modules, and those before."""
        self._others = NotedRecords(self._changeable)
        containers = [record.containers for record in self._changeable]
        self._known = [(self._others, containers), *self._known[: _KNOWN - 1]]

    def return_to_known(self) -> bool:
        """Use what was noted in an earlier call, if the changeable modules have the same contents again."""
        for index, (noted, containers) in enumerate(self._known):
            if not noted.have_changed:
                self._known.insert(0, self._known.pop(index))
                self._others = noted
                for record, of_record in zip(self._changeable, containers, strict=True):
                    record.containers = of_record
                return True
        return False

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
        return NotedState(
            [(record.containers, record.tensors) for record in self._records], self._hook_tables, self._changing
        )

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
            value = dict(held(value))[key]
        return value
