"""The entry point of ``cnnstrategies``, ``python -m cnnstrategies`` and ``cli.py``.

Modules that take time to import are imported inside the functions. :func:`main` can then install its signal handling
first, so that Ctrl-C during an import ends the program without a traceback.
"""

import signal
import sys
from collections.abc import Sequence

from cnnstrategies.errors import ConfigurationError


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the command-line arguments name.

    After a mistake of the user, print one line and exit with the error's exit code, usually 2. After a signal, exit
    with code 128 + the signal's number.

    Args:
        args: Command-line arguments without the program's name; by default the arguments of this process.
    """
    try:
        if args is not None:
            sys.argv[1:] = args
        from cnnstrategies.runtime.stop_signals import ends_on_signals, wait_if_ending

        # During training, the callback GracefulStop acts on signals instead.
        with ends_on_signals():
            from cnnstrategies.commands.arguments.refuse import write_anywhere

            write_anywhere()
            try:
                _run(sys.argv[1:])
            finally:
                wait_if_ending()  # An error may be a consequence of the signal that is ending this process.
    except ConfigurationError as error:
        from cnnstrategies.commands.arguments.refuse import fail, in_one_line, shows_tracebacks

        if shows_tracebacks():
            raise
        fail(in_one_line(str(error)), error.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(arguments: Sequence[str]) -> None:
    """Run the command that the first argument names, or show the help or the version."""
    import importlib.metadata
    import os

    from cnnstrategies.commands.arguments import help
    from cnnstrategies.commands.arguments.keys import accepted, with_underscores
    from cnnstrategies.commands.arguments.options import COMMANDS
    from cnnstrategies.commands.arguments.refuse import show
    from cnnstrategies.runtime.processes import STARTER, end_with_parent, end_with_supervision, starter_variable

    end_with_supervision()
    if os.environ.get("LOCAL_RANK", "0") != "0":
        starter = starter_variable(STARTER)
        end_with_parent(None if starter is None else int(starter))
    name = arguments[0] if arguments else help.HELP_OPTIONS[0]
    if name in help.HELP_OPTIONS:
        show(help.overview())
    elif name == "--version":
        show(f"cnnstrategies {importlib.metadata.version('cnnstrategies')}")
    elif name not in COMMANDS:
        raise ConfigurationError(f"unknown command {name!r}{accepted(name, list(COMMANDS))}")
    elif any(argument in help.HELP_OPTIONS for argument in arguments):
        show(help.of_command(COMMANDS[name]))
    elif help.FULL in (options := with_underscores(arguments)):
        show(help.in_full(COMMANDS[name], "".join(options[options.index(help.FULL) + 1 :][:1])))
    else:
        COMMANDS[name].run(arguments[1:])


def server() -> None:
    """Run the program ``cnnstrategies-server``, which :mod:`cnnstrategies.commands.server` describes."""
    try:
        from cnnstrategies.runtime.stop_signals import ends_on_signals

        with ends_on_signals():
            from cnnstrategies.commands.server import main

            main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
