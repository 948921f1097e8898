"""``cnnstrategies-server``: run a dedicated server for the strategy ``parameter_server``.

Start one process for each server, on the machines that will hold the parameters::

    cnnstrategies-server --config run.yaml --index 0

The configuration is the run's own configuration. Its strategy must have ``endpoints``, a list with the address of each
dedicated server, and ``coordinator``, an address on the machine of rank 0. ``--index`` is the position of this server's
address in ``endpoints``, from 0. A server serves one run, and may be started before or after the run.
"""

import ipaddress
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.strategies import StrategyRegistry

from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.commands.arguments import help
from cnnstrategies.commands.arguments.options import PROGRAMS
from cnnstrategies.commands.arguments.refuse import show
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import ROOT, is_now, renamed
from cnnstrategies.paramserver.coordinator.settings import SERVER, Address
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.services import ServerProcess, serve_and_exit
from cnnstrategies.strategies.parameter_server import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.run import key_file_of, own_address

APPEAR = 600.0  # Time-out in seconds for the run's coordinator, unless the configuration sets `interconnect.wait`.


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a dedicated server until the run is over, or write a key file.

    After a mistake in the options or the configuration, print one line and exit with code 2.

    Args:
        arguments: Command-line arguments without the program's name; by default the arguments of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    command = PROGRAMS["cnnstrategies-server"]
    if any(argument in help.HELP_OPTIONS for argument in arguments):
        show(help.of_command(command))
        return
    try:
        options, _ = command.parse(arguments)
        if options.make_keys is not None:
            _make_keys(options.make_keys)
            return
        serve_and_exit(server_of(options.config, options.index), dedicated=True)
    except (ConfigurationError, OSError, TypeError) as error:
        print(f"cnnstrategies-server: {error}", file=sys.stderr)
    sys.exit(2)


def _make_keys(path: Path) -> None:
    try:
        KeyPair.create().save(path)
    except FileExistsError:
        raise ConfigurationError(
            f"--make_keys {path}: the file exists, and keys are not overwritten; give a new file name"
        ) from None
    print(
        f"Wrote {path}: copy the file to every machine of the run, and set the strategy's option key_file to its path"
    )


def server_of(configs: Sequence[Path], index: int) -> ServerProcess:
    """Return a dedicated server that a run's configuration describes.

    Args:
        configs: Configuration files. Later files override earlier files.
        index: Index of the server's address in the strategy's ``endpoints``.

    Raises:
        ConfigurationError: The strategy has no dedicated servers, or the index is too large.
    """
    arguments: dict[str, Any] = {}
    wait = APPEAR
    for path in configs:
        configuration = yaml.safe_load(path.read_text()) or {}
        for name in configuration:
            if (new := renamed(ROOT, name)) is not None:
                raise ConfigurationError(f"{path}: {is_now(name, new)}")
        wait = Interconnect(wait=(configuration.get("interconnect") or {}).get("wait", wait)).wait
        strategy = (configuration.get("trainer") or {}).get("strategy")
        if isinstance(strategy, dict):
            name = strategy.get("class_path")
            registered = StrategyRegistry[name]["init_params"] if name in StrategyRegistry else {}
            arguments |= {**registered, **(strategy.get("init_args") or {})}
    strategy_arguments = {name: value for name, value in arguments.items() if name != "start_method"}
    options = ParameterServerStrategy(**strategy_arguments).options
    if not options.endpoints or options.coordinator is None:
        raise ConfigurationError(
            "the configuration names no endpoints: dedicated servers need the options endpoints and coordinator in "
            "trainer.strategy.init_args, with class_path parameter_server; without endpoints, no dedicated server is "
            "needed, because each node of the run starts its own servers"
        )
    if not 0 <= index < len(options.endpoints):
        raise ConfigurationError(
            f"--index {index}: the configuration names {len(options.endpoints)} endpoints, so use 0 to "
            f"{len(options.endpoints) - 1}"
        )
    key_file = key_file_of(options, options.coordinator)
    address = Address(options.coordinator, SERVER, index, 0, options.heartbeat, options.timeout, wait)
    return ServerProcess(
        address, _bound(options.endpoints[index], options.coordinator), key_file, options.security == "none"
    )


def _bound(endpoint: str, coordinator: str) -> str:
    """Return the address to which a dedicated server binds its socket.

    An endpoint with an IP address is returned unchanged. A host name often resolves to a loopback address on its own
    machine, so for a host name the server binds to the IP address of the network interface that leads to the
    coordinator. Workers get this address from the coordinator.

    Args:
        endpoint: The server's address in the configuration.
        coordinator: The coordinator's address.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"tcp://{own_address(coordinator)}:{port}"
    return endpoint


if __name__ == "__main__":
    main()
