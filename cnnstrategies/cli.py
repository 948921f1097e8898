"""The entry point of ``cnnstrategies``, ``python -m cnnstrategies`` and ``cli.py``: finds the command and runs it."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from cnnstrategies.commands import early, help, recipes
from cnnstrategies.commands.refuse import fail, in_one_line, show, shows_tracebacks
from cnnstrategies.commands.table import COMMANDS
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.processes import STARTER, end_with_parent, told_by_starter


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    Exits with 2 and one line for a mistake in the configuration, with 128 + the signal's number after a signal.

    Args:
        args: The words after the program's name; by default those of this process.
    """
    if args is not None:
        sys.argv[1:] = args
    # As an exception it passes through `ends_together`, which ends the other processes; in training GracefulStop takes
    # over.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        starter = told_by_starter(STARTER)
        end_with_parent(None if starter is None else int(starter))
    try:
        _run(sys.argv[1:])
    except ConfigurationError as error:
        if shows_tracebacks():
            raise
        fail(in_one_line(str(error)))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(words: Sequence[str]) -> None:
    if not words or words[0] in help.HELP_WORDS:
        show(help.overview())
        return
    name = words[0]
    if name not in COMMANDS:
        raise ConfigurationError(f"no command {name!r}{early.accepted(name, list(COMMANDS))}")
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
        if "LOCAL_RANK" not in os.environ:
            early.check(words)
    command.run(words)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
