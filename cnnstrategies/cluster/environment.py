"""Detection of the launcher that started this process, for Lightning, the data modules and ``cnnstrategies doctor``."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from cnnstrategies.cluster import launchers
from cnnstrategies.cluster.addresses import main_port_of
from cnnstrategies.cluster.claimed_processes import adopt_platform, check_processes
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of

REPORT_SECONDS = 5.0  # Time in which rank 0 reports why the run is refused, before the other ranks end.


def local_rank() -> int:
    """Return the local rank from the launcher's environment variables. Without a launcher the local rank is 0.

    This works before Lightning has chosen a cluster environment.
    """
    return launchers.local_rank(os.environ)


def environment_plugins(plugins: list[Any], num_nodes: int = 1) -> list[ClusterEnvironment]:
    """Return a list with the cluster environment of this process's launcher, to be added to ``trainer.plugins``.

    The list is empty if Lightning itself chooses the right environment: without a launcher, under torchrun, and if the
    user's plugins include a cluster environment.

    Args:
        plugins: Plugins from the configuration.
        num_nodes: Number of nodes of the trainer.

    Raises:
        ConfigurationError: The run has several nodes, but the launcher has started a process on only one of them; or
            ``MASTER_PORT`` is not a port.
    """
    with refused_once():
        main_port_of(os.environ)
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return []
    adopt_platform()
    if (launcher := launchers.rank_launcher(os.environ)) is not None:
        with refused_once():
            return [] if launcher.lightning_detects else [launcher.environment()]
    for launcher in launchers.detected(os.environ):
        if (environment := launcher.script_environment(os.environ, num_nodes)) is not None:
            return [environment]
    return []


@contextlib.contextmanager
def refused_once() -> Iterator[None]:
    """Make only rank 0 report an error that all ranks raise inside this context. The other ranks exit with its code.

    The other ranks first wait, because launchers such as mpirun kill rank 0 as soon as another rank has failed.
    """
    try:
        yield
    except ConfigurationError as error:
        if launchers.process_number(os.environ) == 0:
            raise
        time.sleep(REPORT_SECONDS)
        sys.exit(error.exit_code)


@dataclass(frozen=True)
class DoctorPlace:
    """Node, local rank and main address of a process of ``doctor``. Only processes with local rank 0 make checks.

    Attributes:
        node: Number of this node.
        nodes: Number of nodes.
        local_rank: Rank of this process on its node.
        environment: Cluster environment, with the address of the first node.
    """

    node: int
    nodes: int
    local_rank: int
    environment: ClusterEnvironment = field(compare=False)


def find_place() -> DoctorPlace | None:
    """Return the node, local rank and main address of this ``doctor`` process, from the launcher's variables.

    The result is None if no launcher has started this process.
    """
    adopt_platform()
    for launcher in launchers.launchers():
        if launcher.starts_ranks(os.environ) or launcher.starts_nodes(os.environ):
            environment, nodes = launcher.environment(), launcher.nodes(os.environ)
            return DoctorPlace(environment.node_rank(), nodes, environment.local_rank(), environment)
    return None


def check_world(trainer: Trainer) -> None:
    """Check that the launcher has started as many processes as the trainer expects.

    Otherwise a part of the data would be assigned to ranks that do not exist, and would not be used for training.

    Raises:
        ConfigurationError: The numbers of processes differ. Only rank 0 raises this error; the other ranks exit.
    """
    with refused_once():
        _check_world(trainer)


def _check_world(trainer: Trainer) -> None:
    launcher = launchers.rank_launcher(os.environ)
    environment = facts_of(trainer.strategy).environment
    check_processes(environment, trainer.num_nodes, trainer.num_devices)
    if environment is None and launcher is not None:
        environment = launcher.environment()
    # With `LightningEnvironment`, Lightning itself starts the processes, so the number of processes is correct.
    if environment is None or isinstance(environment, LightningEnvironment):
        return
    nodes, devices, world = trainer.num_nodes, trainer.num_devices, environment.world_size()
    if world != nodes * devices:
        program, command = "The launcher", "this number of processes"
        if launcher is not None:
            program, command = str(launcher.program), f"the run with `{launcher.start_command(nodes, devices)}`"
        raise ConfigurationError(
            f"{program} has started {world} {'process' if world == 1 else 'processes'}, but trainer.num_nodes={nodes} "
            f"x trainer.devices={devices} needs {nodes * devices}: start {command}, or change trainer.num_nodes and "
            "trainer.devices"
        )
    try:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise ConfigurationError(f"trainer.num_nodes={nodes}, trainer.devices={devices}: {error}") from error
