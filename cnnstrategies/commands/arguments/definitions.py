"""Search for the definition of a class or function in source files, without importing them.

A configuration can thus be checked before torch is imported, which takes seconds. What the source does not show, for
example because a decorator changes a signature, is reported as unknown and never as a mistake.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

KNOWN = (
    "cnnstrategies",
    "lightning",
    "torch",
    "torchvision",
)  # Packages whose decorators keep constructors' signatures.
PASSES_ON = "cnnstrategies"  # Package whose constructors use ``**kwargs`` only for the constructors of base classes.
MOST_STEPS = 12  # Largest number of imports and base classes that a search follows.
DYNAMIC = ("globals()", "sys.modules", "vars()", "__getattr__")  # Code that may define more names.


class UnknownError(Exception):
    """The source files do not show the definition.

    Args:
        path: What was looked for.
        others: Names that exist in the same place, as far as they are known.
    """

    def __init__(self, path: str, others: Sequence[str] = ()) -> None:
        super().__init__(path)
        self.others = others


class AbsentError(Exception):
    """A module or its attribute does not exist.

    Args:
        reason: Text for the user.
        name: The name that does not exist.
        others: Names that exist in the same place.
    """

    def __init__(self, reason: str, name: str, others: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.name = name
        self.others = others


Node = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Definition:
    """A class or function in a source file.

    Attributes:
        module: Name of the module.
        file: The module's file.
        node: The syntax tree of the class or function.
    """

    module: str
    file: Path
    node: Node

    @property
    def known(self) -> bool:
        """Whether the module is part of a package in `KNOWN`."""
        return self.module.partition(".")[0] in KNOWN


def definition_of(path: str, steps: int = MOST_STEPS) -> Definition:
    """Return the definition of the class or function with an import path.

    Args:
        path: Import path, such as ``torch.optim.SGD``.
        steps: Largest number of imports that the search follows.

    Raises:
        AbsentError: A module of the path does not exist, or has no such name.
        UnknownError: The source files do not show the definition.
    """
    module, file, rest = _module_in(path)
    if len(rest) != 1 or file is None or file.suffix != ".py" or steps == 0:
        raise UnknownError(path)
    return _member(module, file, rest[0], steps)


def file_of(path: str) -> Path | None:
    """Return the source file of the module in the import path of a class; None if the file cannot be found."""
    try:
        _, file, rest = _module_in(path)
    except (AbsentError, UnknownError):
        return None
    return file if len(rest) == 1 and file is not None and file.suffix == ".py" else None


def _module_in(path: str) -> tuple[str, Path | None, list[str]]:
    """Return the longest beginning of an import path that is a module, the module's file, and the rest of the path."""
    first, *rest = path.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError) as error:
        raise UnknownError(path) from error
    if spec is None:
        raise AbsentError(f"No module named {first!r}", first)
    module, file, folders = first, spec.origin, list(spec.submodule_search_locations or ())
    while rest and folders:
        file_in = [Path(folder, rest[0], "__init__.py") for folder in folders]
        file_in += [Path(folder, f"{rest[0]}.py") for folder in folders]
        below = next((candidate for candidate in file_in if candidate.is_file()), None)
        if below is None:
            break
        folders = [str(below.parent)] if below.name == "__init__.py" else []
        module, file = f"{module}.{rest.pop(0)}", str(below)
    return module, None if file is None else Path(file), rest


@functools.cache
def _source(file: Path) -> tuple[str, ast.Module]:
    try:
        text = file.read_text(encoding="utf-8")
        return text, ast.parse(text)
    except (OSError, SyntaxError, UnicodeError, ValueError) as error:
        raise UnknownError(str(file)) from error


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, part, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _statements(handler.body)


def _member(module: str, file: Path, name: str, steps: int) -> Definition:
    """Return the definition of a name in a module."""
    text, tree = _source(file)
    names: list[str] = []
    definition: ast.stmt | None = None
    imported: str | None = None
    starred: list[str] = []
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(statement.name)
            definition = statement if statement.name == name else definition
        elif isinstance(statement, ast.ImportFrom):
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            for _ in range(statement.level - 1):
                package = package.rpartition(".")[0]
            start = ".".join(filter(None, (package if statement.level else "", statement.module)))
            for alias in statement.names:
                if alias.name == "*":
                    starred.append(f"{start}.{name}")
                    continue
                names.append(alias.asname or alias.name)
                if names[-1] == name:
                    imported = f"{start}.{alias.name}"
        elif isinstance(statement, ast.Import):
            names += [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
        else:
            targets = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            names += [node.id for node in targets if isinstance(node.ctx, ast.Store)]
    if isinstance(definition, ast.ClassDef | ast.FunctionDef) and names.count(name) == 1:
        return Definition(module, file, definition)
    if imported is not None and names.count(name) == 1:
        return definition_of(imported, steps - 1)
    for path in starred if name not in names else ():  # As `from .resnet import *`.
        if steps == 0:
            raise UnknownError(path)
        try:
            return definition_of(path, steps - 1)
        except AbsentError as error:
            names += error.others
    if name in names or any(word in text for word in DYNAMIC):
        raise UnknownError(f"{module}.{name}", names)
    raise AbsentError(f"module {module!r} has no attribute {name!r}", name, names)


def parameters_in(definition: Definition, steps: int = MOST_STEPS) -> dict[str, ast.expr | None]:
    """Return the parameters of a function, or of a class's constructor, with their annotations.

    Args:
        definition: The function or class.
        steps: Largest number of base classes that the search follows.

    Raises:
        UnknownError: The source files do not show all parameters.
    """
    parameters = _constructor(definition, steps) if isinstance(definition.node, ast.ClassDef) else _of(definition.node)
    if parameters is None:
        raise UnknownError(definition.node.name)
    return parameters


def method_parameters(definition: Definition, name: str) -> list[str]:
    """Return the names of a method's parameters; an empty list if the class itself has no such method."""
    methods = (entry for entry in definition.node.body if isinstance(entry, ast.FunctionDef) and entry.name == name)
    return [parameter for method in methods for parameter in _named(method)]


def _of(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    if function.args.kwarg is not None or function.decorator_list:
        raise UnknownError(function.name)
    return _named(function)


def _named(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    arguments = function.args
    return {entry.arg: entry.annotation for entry in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _constructor(definition: Definition, steps: int) -> dict[str, ast.expr | None] | None:
    """Return the parameters of a class's constructor; None if neither the class nor a base class has a constructor."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    functions = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
    if node.decorator_list and not definition.known:
        raise UnknownError(node.name)
    if any(isinstance(entry, ast.Name) and entry.id == "dataclass" for entry in node.decorator_list):
        if node.bases:
            raise UnknownError(node.name)
        fields = (entry for entry in node.body if isinstance(entry, ast.AnnAssign))
        return {entry.target.id: entry.annotation for entry in fields if isinstance(entry.target, ast.Name)}
    makers = [entry for entry in functions if entry.name in ("__init__", "__new__")]
    if [entry.name for entry in makers] == ["__init__"]:
        positional = makers[0].args.posonlyargs or makers[0].args.args
        if not positional or (makers[0].decorator_list and not definition.known):
            raise UnknownError(node.name)
        _, *named = _named(makers[0]).items()  # The first parameter is the object.
        parameters = dict(named)
        if makers[0].args.kwarg is None:
            return parameters
        if definition.module.partition(".")[0] != PASSES_ON:
            raise UnknownError(node.name)
        inherited = _inherited(definition, steps)
        return {name: kind for constructor in (*inherited, parameters) for name, kind in constructor.items()}
    if makers or any(keyword.arg == "metaclass" for keyword in node.keywords):
        raise UnknownError(node.name)
    constructors = _inherited(definition, steps)
    if len(constructors) > 1:  # Which of them is used depends on the order of the classes above.
        raise UnknownError(node.name)
    return constructors[0] if constructors else None


def _inherited(definition: Definition, steps: int) -> list[dict[str, ast.expr | None]]:
    """Return the parameters of the base classes' constructors, without base classes that have no constructor."""
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    constructors = []
    for base in node.bases:
        if not isinstance(base, ast.Name) or steps == 0:
            raise UnknownError(node.name)
        try:
            above = _member(definition.module, definition.file, base.id, steps)
        except AbsentError as error:  # For example a class that a function of the module creates.
            raise UnknownError(node.name) from error
        if isinstance(above.node, ast.ClassDef) and (parameters := _constructor(above, steps - 1)) is not None:
            constructors.append(parameters)
    return constructors
