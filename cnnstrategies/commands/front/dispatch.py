"""Finds the command that was meant, and what was meant by its words, and runs it."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence

from cnnstrategies.commands.front import help, recipes
from cnnstrategies.commands.front.given import accepted
from cnnstrategies.commands.front.refuse import show
from cnnstrategies.commands.front.table import COMMANDS
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.processes import STARTER, end_with_parent, told_by_starter

VERSION = "--version"


def run(words: Sequence[str]) -> None:
    """Run a command.

    Raises:
        ConfigurationError: There is no such command, or its words are mistaken.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        starter = told_by_starter(STARTER)
        end_with_parent(None if starter is None else int(starter))
    if not words or words[0] in help.HELP_WORDS:
        show(help.overview())
        return
    name = words[0]
    if name == VERSION:
        show(f"cnnstrategies {importlib.metadata.version('cnnstrategies')}")
        return
    if name not in COMMANDS:
        raise ConfigurationError(f"no command {name!r}{accepted(name, list(COMMANDS))}")
    if any(word in help.HELP_WORDS for word in words):
        show(help.of_command(name))
        return
    if help.FULL in words:
        show(help.in_full(name, "".join(words[words.index(help.FULL) + 1 :][:1])))
        return
    command = COMMANDS[name]
    if command.configured:
        # As `python -m` does: whoever runs a configuration has the classes that it names beside it.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        words = recipes.with_files(words)
    command.run(words)
