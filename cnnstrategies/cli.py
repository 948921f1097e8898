"""The entry point of ``cnnstrategies``, ``python -m cnnstrategies`` and ``cli.py``.

From the first line of :func:`main` on, a signal ends the program without a traceback. Imports that take time are
therefore inside the functions.
"""

import signal
import sys
from collections.abc import Sequence

from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    The exit code is 2 for a mistake in the configuration, which is reported in one line, and 128 + the signal's number
    after a signal.

    Args:
        args: Command-line arguments; by default those of this process.
    """
    try:
        if args is not None:
            sys.argv[1:] = args
        # SIGTERM becomes an exception, because `ends_together` ends the other processes on exceptions. During training
        # GracefulStop handles the signal.
        signal.signal(signal.SIGTERM, _exit_on_signal)
        from cnnstrategies.commands.arguments.refuse import write_anywhere

        write_anywhere()
        _run(sys.argv[1:])
    except ConfigurationError as error:
        from cnnstrategies.commands.arguments.refuse import fail, in_one_line, shows_tracebacks

        if shows_tracebacks():
            raise
        fail(in_one_line(str(error)))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(words: Sequence[str]) -> None:
    """Run the command that the first argument names, or show the help or the version."""
    import importlib.metadata
    import os

    from cnnstrategies.commands.arguments import help
    from cnnstrategies.commands.arguments.keys import accepted, with_underscores
    from cnnstrategies.commands.arguments.options import COMMANDS
    from cnnstrategies.commands.arguments.refuse import show
    from cnnstrategies.runtime.processes import STARTER, end_with_parent, starter_variable

    if os.environ.get("LOCAL_RANK", "0") != "0":
        starter = starter_variable(STARTER)
        end_with_parent(None if starter is None else int(starter))
    name = words[0] if words else help.HELP_WORDS[0]
    if name in help.HELP_WORDS:
        show(help.overview())
    elif name == "--version":
        show(f"cnnstrategies {importlib.metadata.version('cnnstrategies')}")
    elif name not in COMMANDS:
        raise ConfigurationError(f"no command {name!r}{accepted(name, list(COMMANDS))}")
    elif any(word in help.HELP_WORDS for word in words):
        show(help.of_command(COMMANDS[name]))
    elif help.FULL in (options := with_underscores(words)):
        show(help.in_full(COMMANDS[name], "".join(options[options.index(help.FULL) + 1 :][:1])))
    else:
        COMMANDS[name].run(words[1:])


def _exit_on_signal(signum: int, frame: "FrameType | None") -> None:
    sys.exit(128 + signum)


def server() -> None:
    """Run ``cnnstrategies-server``; see :mod:`cnnstrategies.commands.server`."""
    try:
        from cnnstrategies.commands.server import main

        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
