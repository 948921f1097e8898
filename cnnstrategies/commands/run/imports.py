"""Check that the user's modules that a configuration names can be imported."""

import linecache
import pydoc
import traceback
from collections.abc import Sequence
from pathlib import Path

from cnnstrategies.commands.arguments.definitions import KNOWN
from cnnstrategies.commands.arguments.early_sources import is_installed
from cnnstrategies.commands.arguments.keys import ConfiguredKey
from cnnstrategies.commands.arguments.refuse import in_one_line, shows_tracebacks
from cnnstrategies.errors import ConfigurationError


def check_imports(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if the import of a module of the user fails, with the line of the user's code.

    A module that does not exist is left to later checks.

    Args:
        keys: The keys of the configuration.
    """
    for key in keys:
        path = key.value
        if not key.path.endswith("class_path") and key.path not in ("model", "data"):
            continue
        if not isinstance(path, str) or not path.replace(".", "_").isidentifier() or "." not in path:
            continue
        if path.partition(".")[0] in KNOWN:
            continue
        try:
            pydoc.locate(path)
        except pydoc.ErrorDuringImport as failure:
            error: BaseException = failure.value or failure
            if shows_tracebacks():
                raise error from None
            where = f"{key.path.removesuffix('.class_path')}: cannot use {path!r}"
            raise ConfigurationError(f"{where}: {_in_users_line(error)}") from error


def _in_users_line(error: BaseException) -> str:
    """Return a text with the class and the message of an error, and the innermost line of the user's own code."""
    summary = f"{type(error).__name__}: {in_one_line(str(error))}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [(file, line) for file, line in frames if Path(file).is_file() and not is_installed(Path(file))]
    lines = [(file, line) for file, line in lines if Path(__file__).parents[2] not in Path(file).parents]
    if not lines:
        return summary
    file, line = lines[-1]
    return f"{summary}, in {Path(file).name}:{line}: {linecache.getline(file, line).strip()}"
