"""The parameters of classes and functions as their source has them, found without importing anything.

To import torch and Lightning takes seconds, and a misspelt key should be told at once. What cannot be read from the
source is not known here, and left to the import.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef
MOST_STEPS = 20  # from one import to the next


@dataclass(frozen=True)
class Module:
    """A module's source.

    Attributes:
        name: With dots.
        is_package: Whether its file is an ``__init__``.
        tree: What it contains.
    """

    name: str
    is_package: bool
    tree: ast.Module

    def statements(self) -> Iterator[ast.stmt]:
        """Its statements, with those of conditions and attempts."""
        pending: list[ast.stmt] = list(self.tree.body)
        while pending:
            statement = pending.pop(0)
            yield statement
            if isinstance(statement, ast.If | ast.Try):
                pending = [*statement.body, *statement.orelse, *pending]

    def source_of(self, statement: ast.ImportFrom) -> str:
        """The module that a ``from`` names, which may be relative to this one."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        own = len(parts) if self.is_package else len(parts) - 1
        return ".".join([*parts[: own - statement.level + 1], *([statement.module] if statement.module else [])])


@dataclass(frozen=True)
class Parameter:
    """A parameter of a class or function.

    Attributes:
        annotation: As it is written.
        module: That in which the annotation's names have their meaning.
        optional: Whether it is None by default.
    """

    annotation: ast.expr | None
    module: Module
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """What a class or function takes.

    Attributes:
        parameters: By name.
        takes_others: Whether it takes, or may take, more than these.
    """

    parameters: Mapping[str, Parameter]
    takes_others: bool


@functools.cache
def read_module(name: str) -> Module | None:
    """A module's source; None if it has none."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    path = Path(spec.origin) if spec.origin and not spec.submodule_search_locations else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if path is None and folders:
        path = folders[0].joinpath(*rest, "__init__.py")
        if not path.is_file() and rest:
            path = folders[0].joinpath(*rest).with_suffix(".py")
    elif rest:
        return None
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    try:
        return Module(name, path.name == "__init__.py", ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError, OSError):
        return None


def find(path: str, steps: int = 0) -> tuple[Definition | ast.Assign, Module] | None:
    """The statement that defines what an import path names, and its module; None if it cannot be found."""
    name, _, attribute = path.rpartition(".")
    module = read_module(name) if name and steps < MOST_STEPS else None
    if module is None:
        return None
    stars = []
    for statement in module.statements():
        if isinstance(statement, Definition) and statement.name == attribute:
            return statement, module
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == attribute for target in statement.targets
        ):
            return statement, module
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == attribute:
                    return find(f"{module.source_of(statement)}.{alias.name}", steps + 1)
                if alias.name == "*":
                    stars.append(module.source_of(statement))
    return next((found for star in stars if (found := find(f"{star}.{attribute}", steps + 1))), None)


def signature(path: str) -> Signature | None:
    """The parameters of a class or function; None if it is not found."""
    found = find(path)
    if found is None:
        return None
    definition, module = found
    if isinstance(definition, ast.FunctionDef):
        return _of_function(definition, module)
    return _of_class(definition, module) if isinstance(definition, ast.ClassDef) else None


def _of_class(definition: ast.ClassDef, module: Module) -> Signature:
    bases = (signature(f"{module.name}.{_name(base)}") for base in definition.bases)  # Read only where they count.
    if any(_name(decorator).rpartition(".")[2] == "dataclass" for decorator in definition.decorator_list):
        fields = [one for one in definition.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        own = {one.target.id: Parameter(one.annotation, module) for one in fields if isinstance(one.target, ast.Name)}
        return _with(Signature(own, takes_others=False), bases)
    init = next((one for one in definition.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if init is None:
        return _with(Signature({}, takes_others=True), islice(bases, 1))
    given = _of_function(init, module)
    return _with(given, islice(bases, 1)) if given.takes_others and _hands_on(init) else given


def _hands_on(init: ast.FunctionDef) -> bool:
    """Whether a constructor gives what else it takes to that of its base."""
    assert init.args.kwarg is not None
    others = init.args.kwarg.arg
    return any(
        keyword.arg is None and ast.unparse(keyword.value) == others
        for call in ast.walk(init)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
        for keyword in call.keywords
    )


def _with(given: Signature, bases: Iterable[Signature | None]) -> Signature:
    """What a class takes together with what it hands on to its bases."""
    found = list(bases)
    inherited = {name: one for base in found if base is not None for name, one in base.parameters.items()}
    open_bases = any(base is None or base.takes_others for base in found)
    return Signature({**inherited, **given.parameters}, takes_others=open_bases if found else given.takes_others)


def _of_function(function: ast.FunctionDef, module: Module) -> Signature:
    first = [*function.args.posonlyargs, *function.args.args]
    # Defaults are of the last ones; of those by keyword there is one each.
    given = [*reversed(function.args.defaults), *[None] * len(first)][: len(first)]
    defaults = zip([*first, *function.args.kwonlyargs], [*reversed(given), *function.args.kw_defaults], strict=True)
    named = {
        one.arg: Parameter(one.annotation, module, optional=isinstance(default, ast.Constant) and default.value is None)
        for one, default in defaults
        if one.arg != "self"
    }
    return Signature(named, takes_others=function.args.kwarg is not None)


def _name(expression: ast.expr) -> str:
    """The dotted name of a decorator or base class."""
    if isinstance(expression, ast.Call):
        expression = expression.func
    if isinstance(expression, ast.Subscript):
        expression = expression.value
    return ast.unparse(expression)
