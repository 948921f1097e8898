"""Restore everything that a network's forward changes while the network is traced.

While torch.fx traces a forward, the forward runs with proxies in place of tensors. If it stores a value in an
attribute, appends a value to a list, updates a buffer or draws a random number, it really does so. :class:`Untouched`
undoes this, and reports which modules' state the forward has changed.
"""

import inspect
import random
from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from cnnstrategies._torch_private import without_modes, writes
from cnnstrategies.pipeline.outside_variables import Variables, is_library, used_by_class, used_by_function
from cnnstrategies.runtime.generator_states import GeneratorStates

# Objects of these types are shared with other code, or have no state that a forward changes.
_PASSED_OVER = (type, ModuleType, FunctionType, MethodType, nn.Parameter, torch.device, torch.Size)
# The search covers the attributes of a module's attributes, and ends there. Otherwise it would reach the rest of the
# program: a LightningModule, for example, refers to its trainer.
_OBJECT_DEPTH = 2
# Number of functions and classes between a module's class and a variable that is recorded.
_VARIABLES_DEPTH = 4
# Dictionaries in which torch keeps a module's parameters, buffers and submodules. A key is an attribute's name.
_REGISTRIES = ("_parameters", "_buffers", "_modules")

# Attributes with values of these types are settings or counters. bool is included as a subclass of int.
_PLAIN = (int, float, str, bytes, type(None))

# Kind of a change of an attribute.
#   value: the attribute has got a number, a string or None
#   content: a list, dictionary, set or object that the attribute holds has got numbers, strings or None
#   object: any other change, for example if the attribute has got a tensor
Change = Literal["value", "content", "object"]

# Function that restores a recorded value. It returns the changes: the key of each element that was different, or "",
# and whether the element's value was a number, a string or None.
Restore = Callable[[], dict[str, bool]]


class Untouched:
    """Context in which a network may be traced. When the context ends, the network is as it was before.

    The context restores:

    - attributes of the network's modules, among them registered hooks and training modes,
    - lists, dictionaries, sets and objects that these attributes hold,
    - the values of buffers and of other tensors that are not parameters,
    - the states of the generators of random numbers, and of generators that a module holds.

    Args:
        network: The network.

    Attributes:
        changed: Modules whose state was changed inside the context, each with the names of the changed attributes.
            The value of a name is the kind of the change. Set when the context ends.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        # Id of the module that holds the value, name of the module's attribute, and the function that restores it.
        self._records: list[tuple[int, str, Restore]] = []
        self._outside: list[Restore] = []
        # Keys are ids. The objects are kept so that no new object gets the id of a recorded one.
        self._seen: dict[int, Any] = {}
        self.changed: dict[nn.Module, dict[str, Change]] = {}

    def __enter__(self) -> Self:
        """Record the state of the network."""
        self._random = GeneratorStates.current()
        self._record_module(self._network)
        for kind in {type(module) for module in self._network.modules()}:
            if not kind.__module__.startswith("torch."):
                self._record_outside(inspect.unwrap(kind.forward))
                self._record_variables(kind)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the state of the network."""
        changes: dict[int, dict[str, Change]] = {}
        # During training each rank compares only the tensors that it has, so no rank waits for a result of another one.
        with without_modes():
            for module, name, restore in self._records:
                for key, is_plain in restore().items():
                    has_key = bool(key) and name in ("", *_REGISTRIES)
                    kind: Change = "object" if not is_plain else "value" if has_key else "content"
                    changes.setdefault(module, {})[key if has_key else name] = kind
        self._random.restore()
        self.changed = {module: changes[id(module)] for module in self._network.modules() if id(module) in changes}
        self._records.clear()
        self._seen.clear()

    def restore_outside(self) -> None:
        """Restore lists, dictionaries and sets that are global variables, or variables of an enclosing function.

        These variables are not attributes of a module. The method is a separate one because the caller may have to find
        out first which module's code has stored a proxy in them.
        """
        for restore in self._outside:
            restore()
        self._outside.clear()

    def _record_outside(self, function: Any) -> None:
        """Record the variables that a function can read and that are neither its own nor an object's."""
        cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != CellType())
        values = [value for name, value in getattr(function, "__globals__", {}).items() if name[:2] != "__"]
        for value in (*values, *cells):
            if isinstance(value, dict | list | set | deque) and id(value) not in self._seen:
                self._seen[id(value)] = value
                restore, _ = _restorer(value)
                if restore is not None:
                    self._outside.append(restore)

    def _record_variables(self, kind: type) -> None:
        """Record the variables outside of objects that the code of a user's class can reach."""
        waiting: list[tuple[Any, int]] = [(kind, 0)]
        while waiting:
            value, depth = waiting.pop()
            if isinstance(value, MethodType):
                value = value.__func__
            if id(value) in self._seen or isinstance(value, (*_PLAIN, Tensor, nn.Module)):
                continue
            self._seen[id(value)] = value
            used: list[tuple[str, Any]] = []
            if isinstance(value, Variables):
                self._outside.append(value.restorer())
            elif isinstance(value, dict | list | set | deque):
                restore, _ = _restorer(value)
                assert restore is not None
                self._outside.append(restore)
            elif isinstance(value, FunctionType):
                used = list(used_by_function(value))
            elif isinstance(value, type):
                used = list(used_by_class(value))
            elif isinstance(value, SimpleNamespace) or (
                hasattr(value, "__dict__") and not is_library(type(value).__module__)
            ):
                self._outside.append(_restore_dict(vars(value)))
            if depth < _VARIABLES_DEPTH:
                waiting += [(element, depth + 1) for _, element in used]

    def _record_module(self, module: nn.Module) -> None:
        self._seen[id(module)] = module
        self._records.append((id(module), "", _restore_dict(vars(module))))
        for name, value in vars(module).items():
            self._record(value, module, name, 0)

    def _record(self, value: Any, module: nn.Module, name: str, depth: int) -> None:
        """Record the state of a value, and of the values that it holds.

        Args:
            value: The value.
            module: Module that holds the value.
            name: Name of the module's attribute that holds the value.
            depth: Number of plain objects between the module and the value.
        """
        if value is None or isinstance(value, str | int | float) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._record_module(value)
            return
        if isinstance(value, _PASSED_OVER):
            return
        self._seen[id(value)] = value
        restore, held = _restorer(value)
        if restore is None and held is None and hasattr(value, "__dict__") and depth < _OBJECT_DEPTH:
            depth += 1
            restore, held = _restore_dict(vars(value)), list(vars(value).values())
        if restore is not None:
            self._records.append((id(module), name, restore))
        for element in held or ():
            self._record(element, module, name, depth)


def _bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _restorer(value: Any) -> tuple[Restore | None, list[Any] | None]:
    """Return a function that restores a value, and the values that it holds; None for each that does not exist."""
    match value:
        case Tensor():
            return _restore_tensor(value), []
        case dict():
            return _restore_dict(value), list(value.values())
        case list() | deque():
            return _restore_sequence(value), list(value)
        case set():
            return _restore_by(lambda: set(value), lambda before: value.symmetric_difference_update(value ^ before)), []
        case tuple():
            return None, list(value)
        case torch.Generator():
            return _restore_by(
                lambda: value.get_state().numpy().tobytes(), lambda state: value.set_state(_bytes(state))
            ), []
        case random.Random():
            return _restore_by(value.getstate, value.setstate), []
        case np.random.Generator():
            bits = value.bit_generator
            return _restore_by(lambda: bits.state, lambda state: setattr(bits, "state", state), repr), []
        case np.random.RandomState():
            return _restore_by(value.get_state, value.set_state, repr), []
    return None, None


def _restore_by(
    read: Callable[[], Any], write: Callable[[Any], Any], comparable: Callable[[Any], Any] = lambda state: state
) -> Restore:
    before = read()

    def restore() -> dict[str, bool]:
        if comparable(read()) == comparable(before):
            return {}
        write(before)
        return {"": False}

    return restore


def _restore_dict(values: dict[Any, Any]) -> Restore:
    # A class of dictionaries may return other objects for its keys than it holds, as transformers' activations do.
    before = dict(values.items())

    def restore() -> dict[str, bool]:
        present = dict(values.items())
        keys = [key for key, value in before.items() if key not in present or present[key] is not value]
        keys += [key for key in present if key not in before]
        changes = {str(key): key in present and isinstance(present[key], _PLAIN) for key in keys}
        if changes:
            values.clear()
            values.update(before)
        return changes

    return restore


def _restore_sequence(values: Any) -> Restore:
    before = list(values)

    def restore() -> dict[str, bool]:
        if len(values) == len(before) and all(now is then for now, then in zip(values, before, strict=True)):
            return {}
        known = {id(value) for value in before}
        is_plain = all(isinstance(value, _PLAIN) for value in values if id(value) not in known)
        values.clear()
        values.extend(before)
        return {"": is_plain}

    return restore


def _restore_tensor(tensor: Tensor) -> Restore | None:
    if type(tensor) is not Tensor or tensor.is_meta or tensor.is_inference():
        return None  # A tensor without values, such as another rank's, or one whose changes torch does not count.
    before, version = tensor.detach().clone(), writes(tensor)

    def restore() -> dict[str, bool]:
        # torch does not count the changes of running statistics by batch normalization.
        is_equal = not tensor.is_floating_point() or torch.allclose(tensor, before, rtol=0, atol=0, equal_nan=True)
        if writes(tensor) == version and is_equal:
            return {}
        tensor.data.copy_(before)
        return {"": False}

    return restore
