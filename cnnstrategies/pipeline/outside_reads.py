"""Numbers and texts outside of a network's modules that the code of the network's containers reads.

A graph of a container's code contains the numbers and texts that the code has read during the trace. If one of them
changes later, for example because a callback sets a global variable, the container has to be traced again.
"""

import dis
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from cnnstrategies.pipeline.outside_variables import MISSING, content_of, function_of, is_library, names_of

_PLAIN = (int, float, complex, str, bytes, type(None))
_SIMPLE = (*_PLAIN, list, tuple, dict)

# A value that code reads: the kind of the variable ("global", "variable" of an enclosing function, or "self"), its
# name, and names of attributes, as in `settings.model.alpha`.
Chain = tuple[str, ...]


def outside_reads(modules: Iterable[nn.Module]) -> list[Callable[[], Any]]:
    """Return a function for each number, text or container of them that the code of modules reads outside of modules.

    Each function returns the present value. Attributes of modules, which a tracer can notice itself, are left out.

    Args:
        modules: The modules whose forwards are traced.
    """
    reads: dict[tuple[int, Chain], Callable[[], Any]] = {}
    for module in modules:
        for function in _functions_of(module):
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            for chain in _chains(function.__code__):
                holder: Any = {"global": function.__globals__, "variable": cells, "self": module}[chain[0]]
                read = partial(_value, holder, chain)
                if (id(holder), chain) not in reads and isinstance(read(), _SIMPLE):
                    reads[id(holder), chain] = read
    return list(reads.values())


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the forward of a module, and the user's functions and methods that it names, directly or indirectly."""
    kind = type(module)
    forward = function_of(kind.forward)
    waiting = [] if forward is None or is_library(forward.__module__) else [forward]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen or is_library(function.__module__):
            continue
        seen.add(id(function))
        yield function
        for name in names_of(function.__code__).read:
            for value in (_attribute_of(kind, name), function.__globals__.get(name)):
                called = function_of(value)
                if called is not None:
                    waiting.append(called)


def _attribute_of(kind: type, name: str) -> Any:
    """Return an attribute of a class without calling descriptors; None if the class does not have it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


@lru_cache(1024)
def _chains(code: CodeType) -> tuple[Chain, ...]:
    """Return the values that code reads, from a global variable, a variable of an enclosing function, or ``self``."""
    chains: dict[Chain, None] = {}
    first = code.co_varnames[0] if code.co_argcount else None
    codes = [code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))]
    for present in codes:
        chain: Chain = ()
        for instruction in dis.get_instructions(present):
            operation, name = instruction.opname, str(instruction.argval)
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = ("global", name)
            elif operation.startswith("LOAD_FAST") and present is code and name == first:
                chain = ("self",)
            elif "DEREF" in operation and operation.startswith("LOAD"):
                chain = ("self",) if name == first else ("variable", name)
            elif operation in ("LOAD_ATTR", "LOAD_METHOD") and chain:
                chain = (*chain, name)
            else:
                chain = ()
            if len(chain) > (2 if chain[:1] == ("self",) else 1):
                chains[chain] = None
    return tuple(chains)


def _value(holder: Any, chain: Chain) -> Any:
    """Return the present value of a chain; `MISSING` if it does not exist, or belongs to a library or a module."""
    kind, *names = chain
    value = holder
    if kind != "self":
        name, *names = names
        value = holder.get(name, MISSING)
        if kind == "variable":
            value = content_of(value) if isinstance(value, CellType) else MISSING
    for index, name in enumerate(names):
        if isinstance(value, ModuleType) and is_library(value.__name__):
            return MISSING
        if isinstance(value, nn.Module) and (index or kind != "self"):
            return MISSING
        try:
            value = getattr(value, name)
        except Exception:  # The user's code has not read this value either.
            return MISSING
    return value
