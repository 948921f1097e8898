"""The entry point of ``cnnstrategies``, ``python -m cnnstrategies`` and ``cli.py``: finds the command and runs it."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from cnnstrategies.commands.refuse import fail, in_one_line, shows_tracebacks
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
        COMMANDS[sys.argv[1]].run(sys.argv[1:])
    except ConfigurationError as error:
        if shows_tracebacks():
            raise
        fail(in_one_line(str(error)))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
