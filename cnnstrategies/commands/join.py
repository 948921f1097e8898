"""``cnnstrategies join``: add a worker to a running run with a parameter server.

The command contacts the run before it imports torch and Lightning, because these imports take seconds. If there is no
run, the command fails at once.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cnnstrategies.commands.arguments.options import JoinOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.places import RunAddress, find_place


def main(options: JoinOptions, arguments: Sequence[str]) -> None:
    """Join a run, and train until the run is over or this process gets a signal.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration.
    """
    address = RunAddress.find(options.run)
    if options.key_file is not None:
        address = replace(address, key_file=str(options.key_file.resolve()))
    if address.key_file is not None and not Path(address.key_file).is_file():
        raise ConfigurationError(
            f"--key_file {address.key_file} does not exist on this machine; copy the file from the machine of rank 0, "
            "where the run wrote it unless its configuration sets key_file"
        )
    try:
        place = find_place(address)
        from cnnstrategies.commands import joining_cli

        joining_cli.run(address, place, arguments)
    except RunEnded as ended:
        if not ended.clean:
            print("\n".join((f"The run cannot continue: {ended.lines[0]}", *ended.lines[1:])), file=sys.stderr)
            sys.exit(1)
        print(f"There is no run to join at {address.coordinator}: {ended}", file=sys.stderr)
