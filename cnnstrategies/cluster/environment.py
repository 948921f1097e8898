"""The launcher of this process, as Lightning, the data and ``cnnstrategies doctor`` need to know it."""

import os
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from cnnstrategies.cluster import launchers
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of


def local_rank() -> int:
    """Return the local rank from the launcher's variables, before Lightning has chosen an environment.

    A process without a launcher has local rank 0.
    """
    return launchers.local_rank(os.environ)


def environment_plugins(plugins: list[Any], num_nodes: int = 1) -> list[ClusterEnvironment]:
    """Return the cluster environment to add to ``trainer.plugins`` for the launcher that started this process.

    The list is empty where Lightning's own choice is right: without a launcher, under torchrun, and if the
    configuration's plugins have a cluster environment.

    Args:
        plugins: Plugins of the configuration.
        num_nodes: The trainer's number of nodes.

    Raises:
        ConfigurationError: The run has several nodes, and the launcher has started a process on only one of them.
    """
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return []
    if (launcher := launchers.rank_launcher(os.environ)) is not None:
        return [] if launcher.lightning_detects else [launcher.environment()]
    for launcher in launchers.detected(os.environ):
        if (environment := launcher.script_environment(os.environ, num_nodes)) is not None:
            return [environment]
    return []


@dataclass(frozen=True)
class DoctorPlace:
    """A process of ``doctor``: its node, and its number on that node. Only the first process of each node works."""

    node: int
    nodes: int
    local_rank: int
    main_address: str
    main_port: int


def find_place() -> DoctorPlace | None:
    """Return this process's node and local rank from the launcher's variables.

    None if no launcher has started processes on other nodes.
    """
    for launcher in launchers.launchers():
        if launcher.starts_ranks(os.environ) or launcher.starts_nodes(os.environ):
            environment, nodes = launcher.environment(), launcher.nodes(os.environ)
            address, port = environment.main_address, environment.main_port
            return DoctorPlace(environment.node_rank(), nodes, environment.local_rank(), address, port)
    return None


def check_world(trainer: Trainer) -> None:
    """Refuse a run whose launcher has started a different number of processes from the number that the trainer expects.

    Each process would train on its share of the data, and nothing would train on the rest.

    Raises:
        ConfigurationError: The numbers of processes differ.
    """
    launcher = launchers.rank_launcher(os.environ)
    environment = facts_of(trainer.strategy).environment
    if environment is None and launcher is not None:
        environment = launcher.environment()
    # With Lightning's own environment the trainer decides how many processes there are.
    if environment is None or isinstance(environment, LightningEnvironment):
        return
    nodes, devices, world = trainer.num_nodes, trainer.num_devices, environment.world_size()
    if world != nodes * devices:
        program, command = "The launcher", "as many"
        if launcher is not None:
            program, command = str(launcher.program), f"them with `{launcher.start_command(nodes, devices)}`"
        raise ConfigurationError(
            f"{program} has started {world} {'process' if world == 1 else 'processes'}, and trainer.num_nodes={nodes} "
            f"x trainer.devices={devices} are {nodes * devices}: start {command}, or change trainer.num_nodes and "
            "trainer.devices"
        )
    try:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise ConfigurationError(f"trainer.num_nodes={nodes}, trainer.devices={devices}: {error}") from error
