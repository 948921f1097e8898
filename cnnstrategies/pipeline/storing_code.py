"""Recognise modules whose forward cannot store anything that outlives the forward, from the code of their classes.

The answer follows from classes, hooks and attributes, which are equal on all ranks, so all ranks know it without
messages. A wrong answer is noticed, because each rank still looks at what its forwards have stored.
"""

import builtins
import dis
import math
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from cnnstrategies._torch_private import hooks_of
from cnnstrategies.pipeline.buffers import is_batch_norm
from cnnstrategies.pipeline.stored_watch import WatchState
from cnnstrategies.pipeline.watched import PLAIN

# Instructions that change an object which other code may refer to.
_STORES = {
    *("STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "DELETE_GLOBAL"),
    *("IMPORT_NAME", "IMPORT_FROM"),
}
# Names of methods that change lists, dictionaries, sets and modules, and of attributes by which all can be changed.
_CHANGES = {
    *("append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "discard"),
    *("appendleft", "extendleft", "popleft", "rotate", "reverse", "sort", "put", "write", "send"),
    *("add_module", "register_module", "register_buffer", "register_parameter", "apply", "register_hook", "train"),
    *("eval", "load_state_dict"),
    *("__dict__", "__setattr__", "__setitem__", "__delattr__", "__iadd__", "_buffers", "_parameters", "_modules"),
}
_BUILTINS = {
    *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "getattr", "hasattr", "int", "isinstance"),
    *("issubclass", "len", "list", "map", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted"),
    *("str", "sum", "super", "tuple", "type", "zip", "print", "repr", "filter", "complex", "NotImplemented"),
}
_PACKAGES = ("torch", "math", "_operator", "operator", "numpy", "typing", "builtins", "collections.abc")
_MODULES = ("torch.nn.modules.", "torchvision.ops.")  # Prefixes of modules whose classes' forwards store nothing.
_verdicts: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()
# By the state of a network: modules, and whether any of them may store something.
_of_states: "WeakKeyDictionary[WatchState, tuple[Sequence[nn.Module], bool]]" = WeakKeyDictionary()


def forget_verdicts() -> None:
    """Look at the code of all modules again, because what is known of a layer has changed."""
    _verdicts.clear()
    _of_states.clear()


def any_may_store(modules: Sequence[nn.Module], state: WatchState) -> bool:
    """Whether any of several modules of a network in a given state may store something."""
    known = _of_states.get(state)
    if known is None or known[0] is not modules:
        known = _of_states[state] = modules, any(map(may_store, modules))
    return known[1]


def may_store(module: nn.Module) -> bool:
    """Whether a module's own forward, or a hook of the module, may store something. Submodules are not considered."""
    if "forward" in vars(module) or has_users_hook(module):
        return True
    if module not in _verdicts:
        _verdicts[module] = False  # Modules may refer to each other.
        _verdicts[module] = _forward_may_store(module)
    return _verdicts[module]


def has_users_hook(module: nn.Module) -> bool:
    """Whether a module has a hook of the user. This package only has hooks on modules of the rank's own stage."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("cnnstrategies.pipeline.") for hook in hooks_of(module)
    )


def function_may_store(function: Any) -> bool:
    """Whether a function that is not a method may store something."""
    return _value_may_store(function, None, set())


def _forward_may_store(module: nn.Module) -> bool:
    if isinstance(module, _NormBase) and module.track_running_stats and not is_batch_norm(module):
        return True  # torch changes these statistics in place.
    if any(next(_definitions(module, name), None) for name in ("__call__", "__getattr__", "__getattribute__")):
        return True
    return any(_value_may_store(function, module, set()) for function in _definitions(module, "forward"))


def _definitions(module: nn.Module, name: str) -> Iterator[Any]:
    """Yield the definitions of an attribute in a module's class and its base classes, except those of torch."""
    for kind in type(module).__mro__:
        if name in vars(kind) and kind not in (nn.Module, object) and not f"{kind.__module__}.".startswith(_MODULES):
            yield vars(kind)[name]


def _code_may_store(function: FunctionType, module: nn.Module | None, seen: set[CodeType]) -> bool:
    """Whether a function may store something.

    Args:
        function: The function.
        module: The module if the function is one of its methods.
        seen: Code that has been read.
    """
    # Other variables of an enclosing function may be functions, such as the function that a decorator has replaced.
    if set(function.__code__.co_freevars) - {"__class__"}:
        return True
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _STORES:
                return True
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                if _attribute_may_store(name, module, seen):
                    return True
            elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name not in function.__globals__:
                    value = getattr(builtins, name, None)
                    is_error = isinstance(value, type) and issubclass(value, BaseException)
                    if name not in _BUILTINS and not is_error:
                        return True
                elif _value_may_store(function.__globals__[name], None, seen):
                    return True
    return False


def _attribute_may_store(name: str, module: nn.Module | None, seen: set[CodeType]) -> bool:
    """Whether the use of an attribute, of an unknown object, may store something."""
    if name in _CHANGES or (name.endswith("_") and not name.endswith("__")):
        return True
    if module is not None:
        if name in vars(module):
            return _value_may_store(vars(module)[name], None, seen)
        if definitions := list(_definitions(module, name)):
            return any(_value_may_store(value, module, seen) for value in definitions)
        if isinstance(getattr(module, name, None), (nn.Module, Tensor)):
            return False  # A submodule, a parameter or a buffer.
    return not any(hasattr(holder, name) for holder in (Tensor, nn.Module, torch, F, math))


def _value_may_store(value: Any, module: nn.Module | None, seen: set[CodeType]) -> bool:
    """Whether the use of a value, such as a call of a function, may store something."""
    if value is None or isinstance(value, (*PLAIN, Tensor, torch.Size)):
        return False
    if isinstance(value, nn.Module):
        return any(map(may_store, value.modules()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_value_may_store(item, None, seen) for item in value)
    if isinstance(value, ModuleType):
        return not f"{value.__name__}.".startswith(tuple(f"{package}." for package in _PACKAGES))
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    package: Any = getattr(value, "__module__", None) or ""
    if callable(value):
        if f"{package}.".startswith(tuple(f"{name}." for name in _PACKAGES)):
            return f"{package}.".startswith("torch.nn.utils.")
        return not isinstance(value, FunctionType) or _code_may_store(value, module, seen)
    return True
