"""Check that a run has all processes of which its environment variables speak.

Many platforms start a process on each of several nodes and describe it by variables of their own. A run that ignores
the variables would train on each node alone, on all data. Such a process joins the others, or is refused.
"""

import os

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from cnnstrategies.cluster import launchers
from cnnstrategies.cluster.launchers import CHECKED, Launcher
from cnnstrategies.cluster.variables import number_of
from cnnstrategies.errors import ConfigurationError

_source: str | None = None  # The platform's variables that this process has adopted, for error messages.


def adopt_platform() -> None:
    """Translate the variables of a platform that starts one process on each node; see :func:`.launchers.adopt`."""
    global _source
    _source = launchers.adopt(os.environ) or _source


def check_processes(environment: ClusterEnvironment | None, nodes: int, devices: int) -> None:
    """Check that a run has all processes of which the environment variables of this process speak.

    Processes that a rank has started, such as tests, inherit its variables. They are not checked.

    Args:
        environment: Cluster environment of the run; None for a strategy with a single process.
        nodes: Number of nodes of the trainer.
        devices: Number of processes of the run on each node.

    Raises:
        ConfigurationError: The variables speak of other processes, with which this process would not train.
    """
    adopt_platform()
    if launchers.is_inherited(os.environ):
        return
    # Other environments have taken the number of processes from a launcher, or belong to the user.
    is_lightnings = environment is None or type(environment) is LightningEnvironment
    launcher = launchers.rank_launcher(os.environ)
    if launcher is not None:
        if environment is not None and is_lightnings:
            _check_ranks(launcher, environment, nodes * devices)
        os.environ[CHECKED] = f"{os.getpid()} {launcher.name}"
    elif is_lightnings and "NODE_RANK" in os.environ:
        _check_nodes(nodes)
        os.environ[CHECKED] = str(os.getpid())
    elif is_lightnings:
        for other in launchers.launchers():
            if (message := other.refusal(os.environ)) is not None:
                raise ConfigurationError(message)


def _check_nodes(nodes: int) -> None:
    """Check that the run has as many nodes as the variables say, and that this node is one of them."""
    node, expected = number_of(os.environ, "NODE_RANK") or 0, number_of(os.environ, "NNODES")
    if node < nodes and expected in (None, nodes):
        return
    names = ("NODE_RANK", "NNODES")
    source = _source or " and ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    number = "the number of nodes" if expected is None else expected
    raise ConfigurationError(
        f"{source}: the run would have other nodes than the platform has started, because trainer.num_nodes={nodes}: "
        f"set trainer.num_nodes to {number} and trainer.devices to the number of devices of a node, or unset these "
        "variables for an independent run on each node"
    )


def _check_ranks(launcher: Launcher, environment: ClusterEnvironment, processes: int) -> None:
    """Check that a script's run has the ranks that a launcher has started, if Lightning does not know the launcher."""
    world, rank = number_of(os.environ, launcher.size_variable) or 1, launcher.number(os.environ)
    joined = environment.creates_processes_externally and environment.global_rank() == rank and world == processes
    if launcher.lightning_knows or world == 1 or joined:
        return
    raise ConfigurationError(
        f"{launcher.rank_variable}={rank} and {launcher.size_variable}={world}: {launcher.program} has started {world} "
        "processes, but each of them would train alone: pass plugins=environment_plugins([]) from "
        "cnnstrategies.cluster.environment to the Trainer, or start the script with torchrun, or unset these variables "
        "for independent runs"
    )
