"""Checks of the user's own modules that a configuration names, from their source files.

A module that cannot be read or that imports a missing module is reported before torch is imported. A module that fails
for another reason is reported when it is imported (see :mod:`cnnstrategies.commands.run.imports`).
"""

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from cnnstrategies.commands.arguments.definitions import KNOWN, AbsentError, UnknownError, definition_of, file_of
from cnnstrategies.commands.arguments.keys import closest
from cnnstrategies.errors import ConfigurationError

INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def check_source(key: str, path: str) -> None:
    """Raise a ConfigurationError if the source file of a class cannot be read, or imports a module that is missing.

    Args:
        key: Key of the configuration, for the error message.
        path: Import path of the class.
    """
    file = file_of(path)
    if file is None or is_installed(file):
        return
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ConfigurationError(
            f"{key}: cannot use {path!r}: {error.msg}, in {file.name}:{error.lineno}: {line}"
        ) from error
    except (OSError, UnicodeError, ValueError):
        return
    for statement, reason in _mistakes(tree):
        line = text.splitlines()[statement.lineno - 1].strip()
        raise ConfigurationError(f"{key}: cannot use {path!r}: {reason}, in {file.name}:{statement.lineno}: {line}")


def is_installed(file: Path) -> bool:
    """Return whether a source file belongs to Python or to an installed package, and not to the user."""
    return str(file).startswith(INSTALLED)


def _mistakes(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the imports at a module's start that certainly fail, with a reason.

    The search ends at the first statement that may change where Python looks for modules.
    """
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            modules = [statement.module]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        else:
            return
        for name in (module.partition(".")[0] for module in modules):
            if name in sys.builtin_module_names:
                continue
            try:
                spec = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                return
            if spec is None:
                remedy = f"install the package that contains it{closest(name, KNOWN).removesuffix(';')}"
                yield statement, f"there is no module {name!r}: {remedy}"
                return
            users = spec.origin not in (None, "built-in", "frozen") and not is_installed(Path(str(spec.origin)))
            if users and name not in KNOWN:  # A module of the user may change where Python looks for modules.
                return
        if isinstance(statement, ast.ImportFrom):
            yield from (
                (statement, reason) for reason in _absent(modules[0], [alias.name for alias in statement.names])
            )


def _absent(module: str, names: Sequence[str]) -> Iterator[str]:
    """Yield a reason for each name that a module of a known package does not have."""
    file = file_of(f"{module}.*")
    if module.partition(".")[0] not in KNOWN or file is None:
        return
    for name in names:
        try:
            definition_of(f"{module}.{name}")
        except UnknownError:
            continue
        except AbsentError as error:
            if not [*file.parent.glob(f"{name}*")]:  # It may be a compiled module.
                yield f"{error}{closest(error.name, error.others).removesuffix(';')}"
