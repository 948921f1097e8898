"""Variables outside of objects that a user's functions can change: global variables, class attributes, closures.

A forward may append a tensor to a list that is a global variable, or assign to an attribute of a class. These values
are not attributes of a module, so a search through the attributes of modules does not find them. This module finds the
variables that the code of functions names.
"""

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

MISSING = object()  # Value of a variable that does not exist.

# Functions and classes of these packages, and of Python's standard library, are not searched. Some of them keep caches
# in global variables, which have no effect on results.
_LIBRARIES = frozenset(
    {
        *("torch", "torchvision", "torchmetrics", "torchaudio", "triton", "functorch", "timm", "einops", "numpy"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "cnnstrategies", "scipy"),
        *("PIL", "cv2", "safetensors", "huggingface_hub", "transformers"),
    }
)


def is_library(name: str | None) -> bool:
    """Whether a Python module, by its name, belongs to a library whose variables are not searched."""
    package = (name or "builtins").partition(".")[0]
    return package in _LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")


class NamesOfCode(NamedTuple):
    """Names in the code of a function, and of the functions that are defined in it.

    Attributes:
        read: Names of global variables and attributes.
        global_variables: Names of global variables that the code assigns to.
        enclosing_variables: Names of variables of an enclosing function that the code assigns to.
        attributes: Names of attributes that the code assigns to, of any object.
    """

    read: tuple[str, ...]
    global_variables: tuple[str, ...]
    enclosing_variables: tuple[str, ...]
    attributes: tuple[str, ...]


@lru_cache(4096)
def names_of(code: CodeType) -> NamesOfCode:
    """Return the names in a function's code."""
    names: tuple[dict[str, None], ...] = ({}, {}, {}, {})
    codes = [code]
    while codes:
        present = codes.pop()
        codes += [constant for constant in present.co_consts if isinstance(constant, CodeType)]
        names[0].update(dict.fromkeys(present.co_names))
        for instruction in dis.get_instructions(present):
            operation = instruction.opname.removeprefix("DELETE_").removeprefix("STORE_")
            if operation == instruction.opname or operation not in ("GLOBAL", "DEREF", "ATTR"):
                continue
            names[("GLOBAL", "DEREF", "ATTR").index(operation) + 1][str(instruction.argval)] = None
    return NamesOfCode(*map(tuple, names))


class Variables:
    """Some variables of one holder: a Python module, a class, slots of an object, or an enclosing function.

    Args:
        holder: The dictionary of a Python module's global variables, cells by name, or an object or class with
            attributes.
        names: Names of the variables. They need not exist.
    """

    def __init__(self, holder: Any, names: tuple[str, ...]) -> None:
        self._holder, self.names = holder, names

    def values(self) -> list[Any]:
        """Return the variables' values, `MISSING` for a variable that does not exist."""
        holder = vars(self._holder) if isinstance(self._holder, type) else self._holder
        if not isinstance(holder, Mapping):
            return [getattr(holder, name, MISSING) for name in self.names]
        values = [holder.get(name, MISSING) for name in self.names]
        return [content_of(value) if isinstance(value, CellType) else value for value in values]

    def items(self) -> list[tuple[str, Any]]:
        """Return the names and values of the variables that exist."""
        return [(n, value) for n, value in zip(self.names, self.values(), strict=True) if value is not MISSING]

    def restorer(self) -> Callable[[], dict[str, bool]]:
        """Return a function that gives the variables the values that they have now; see `untouched.Restore`."""
        before = self.values()

        def restore() -> dict[str, bool]:
            for name, value, old in zip(self.names, self.values(), before, strict=True):
                if value is not old:
                    self.put(name, old)
            return {}

        return restore

    def put(self, name: str, value: Any) -> None:
        """Set a variable. The value `MISSING` deletes it."""
        holder = self._holder
        if not isinstance(holder, dict):
            if value is not MISSING:
                setattr(holder, name, value)
            elif name in vars(holder) if isinstance(holder, type) else hasattr(holder, name):
                delattr(holder, name)
        elif isinstance(holder.get(name), CellType):
            holder[name].cell_contents = value
        elif value is not MISSING:
            holder[name] = value
        else:
            holder.pop(name, None)


def used_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function's code can reach besides its arguments, each with a key.

    Keys are equal on all ranks. Values of class `Variables` are the variables that the code assigns to.
    """
    names = names_of(function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if (content := content_of(cell)) is not MISSING:
            yield f"variable {name}", content
    if assigned := tuple(name for name in names.enclosing_variables if name in cells):
        yield "variables", Variables(cells, assigned)
    if is_library(function.__module__):
        return
    variables = function.__globals__
    if names.global_variables:
        yield "globals", Variables(variables, names.global_variables)
    for name in names.read:
        value = variables.get(name)
        if not isinstance(value, ModuleType):
            if value is not None and not _is_of_library(value):
                yield f"global {name}", value
        elif not is_library(value.__name__):
            if names.attributes:
                yield f"globals of {name}", Variables(vars(value), names.attributes)
            for attribute in names.read:
                held = vars(value).get(attribute)
                if held is not None and not isinstance(held, ModuleType) and not _is_of_library(held):
                    yield f"global {name}.{attribute}", held


def slots_of(value: Any) -> Variables | None:
    """Return the attributes in the slots of an object of the user's class; None if it has none."""
    kind = type(value)
    if is_library(kind.__module__):
        return None
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for of_base in slots for name in ((of_base,) if isinstance(of_base, str) else of_base)]
    names = [name for name in names if name not in ("__dict__", "__weakref__")]
    return Variables(value, tuple(names)) if names else None


def used_by_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that are not constants, each with a key, and the functions of its methods."""
    bases = [base for base in kind.__mro__ if not is_library(base.__module__)]
    for base in bases:
        attributes = dict(vars(base))
        functions = {
            name: function for name, value in attributes.items() if (function := function_of(value)) is not None
        }
        stored = {name: None for function in functions.values() for name in names_of(function.__code__).attributes}
        data = [name for name in attributes if name not in functions and not _is_special(name)]
        yield f"attributes of {base.__qualname__}", Variables(base, tuple(dict.fromkeys([*data, *stored])))
        for name, value in attributes.items():
            if name in functions:
                if not _is_special(name) or name == "__call__":
                    yield f"{base.__qualname__}.{name}", functions[name]
            elif not _is_special(name):
                yield f"{base.__qualname__}.{name}", value


def _is_of_library(value: Any) -> bool:
    """Whether a value is a function or a class that is not the user's."""
    if isinstance(value, (FunctionType, type)):
        return is_library(value.__module__)
    return isinstance(value, BuiltinFunctionType)


def content_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function; `MISSING` if it has no value."""
    return MISSING if cell == CellType() else cell.cell_contents


def function_of(value: Any) -> FunctionType | None:
    """Return the function of a method, a static method, a class method or a property; None for other attributes."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    while not isinstance(value, FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _is_special(name: str) -> bool:
    return name.startswith("__") or name == "_abc_impl"
