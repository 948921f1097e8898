"""The entry point of ``cnnstrategies``, ``python -m cnnstrategies`` and ``cli.py``.

A signal ends the program without a traceback from the first line of :func:`main` on: what takes time is imported there.
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

    Exits with 2 and one line for a mistake in the configuration, with 128 + the signal's number after a signal.

    Args:
        args: The words after the program's name; by default those of this process.
    """
    try:
        if args is not None:
            sys.argv[1:] = args
        # As an exception it passes through `ends_together`, which ends the other processes; in training GracefulStop
        # takes over.
        signal.signal(signal.SIGTERM, _exit_on_signal)
        from cnnstrategies.commands.front.dispatch import run
        from cnnstrategies.commands.front.refuse import write_anywhere

        write_anywhere()
        run(sys.argv[1:])
    except ConfigurationError as error:
        from cnnstrategies.commands.front.refuse import fail, in_one_line, shows_tracebacks

        if shows_tracebacks():
            raise
        fail(in_one_line(str(error)))
    except ImportError as error:
        from cnnstrategies.commands.front.refuse import fail, scarce

        if (line := scarce(error)) is None:
            raise
        fail(line)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _exit_on_signal(signum: int, frame: "FrameType | None") -> None:
    sys.exit(128 + signum)


def server() -> None:
    """``cnnstrategies-server``; see :mod:`cnnstrategies.commands.server`."""
    try:
        from cnnstrategies.commands.server import main

        main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
