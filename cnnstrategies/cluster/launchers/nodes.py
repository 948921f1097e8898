"""Base class of the platforms that start one process on each node, and adoption of their environment variables.

Each of these platforms has its own names for the number of nodes and for the number of this node. :func:`adopt`
translates them into the variables that users also set by hand: ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT``. Lightning and the ranks that it starts understand these variables.
"""

import os
from abc import abstractmethod
from collections.abc import MutableMapping
from typing import NamedTuple

from typing_extensions import override

from cnnstrategies.cluster.launchers.launcher import CHECKED, Environ, Launcher, is_inherited
from cnnstrategies.cluster.launchers.registry import launchers, rank_launcher
from cnnstrategies.errors import ConfigurationError

# Variables that count the nodes on some platforms and the ranks on others. They are removed, because the ranks that
# Lightning starts would inherit wrong values.
AMBIGUOUS = ("RANK", "WORLD_SIZE")
# Variables of torch for the ranks. A process that a rank has started must not take them for its own.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
PROCESSES = "processes"  # Name of the launcher that sets the variables `OF_A_RANK`.


class NodePlace(NamedTuple):
    """Place of this process in a job that has one process on each of several nodes.

    Attributes:
        node: Number of this node.
        nodes: Number of nodes.
        address: Address of the first node; None if ``MASTER_ADDR`` has to be set.
        port: Port on the first node; None if the platform names no port.
        source: The variables and their values, for error messages, such as ``RANK=1 and WORLD_SIZE=4``.
    """

    node: int
    nodes: int
    address: str | None
    port: int | None
    source: str


class NodeLauncher(Launcher):
    """Base class of platforms that start one process on each of several nodes. Lightning starts the ranks of a node."""

    @abstractmethod
    def place(self, environ: Environ) -> NodePlace | None:
        """Return this process's place. Return None if the job has only one node, or is not a job of this platform.

        Raises:
            ConfigurationError: A variable of the platform cannot be read.
        """

    @override
    def detect(self, environ: Environ) -> bool:
        if "NODE_RANK" in environ or is_inherited(environ):
            return False
        return self.place(environ) is not None


def adopt(environ: MutableMapping[str, str]) -> str | None:
    """Translate the variables of a platform that starts one process on each node, also for this process's children.

    Nothing changes if a launcher has started this process as a rank, or if ``NODE_RANK`` is set already.

    Args:
        environ: Environment variables of this process, which are changed in place.

    Returns:
        The variables and their values, for error messages; None if they describe only one node.

    Raises:
        ConfigurationError: A variable of the platform cannot be read, or the address of the first node is not known.
    """
    if is_inherited(environ):
        # Lightning starts ranks only in a process that is not a rank. So a rank has started this process for another
        # purpose, and Lightning must not take its variables for those of a rank.
        if environ[CHECKED].endswith(f" {PROCESSES}") and STARTED_BY_TORCHRUN not in environ:
            for name in OF_A_RANK:
                environ.pop(name, None)
            # Ranks that Lightning starts in this process must keep their variables.
            environ[CHECKED] = str(os.getpid())
        return None
    if rank_launcher(environ) is not None:
        return None
    for launcher in launchers():
        if isinstance(launcher, NodeLauncher) and launcher.detect(environ):
            place = launcher.place(environ)
            assert place is not None
            environ["NODE_RANK"], environ["NNODES"] = str(place.node), str(place.nodes)
            if place.address is not None:
                environ.setdefault("MASTER_ADDR", place.address)
            if "MASTER_ADDR" not in environ:
                raise ConfigurationError(
                    f"{place.source}: this process is node {place.node} of {place.nodes}, but it does not know the "
                    "address of node 0: set MASTER_ADDR on each node"
                )
            if place.port is not None:
                environ.setdefault("MASTER_PORT", str(place.port))
            for name in AMBIGUOUS:
                environ.pop(name, None)
            return place.source
    if STARTED_BY_TORCHRUN not in environ and _is_single(environ):
        environ.pop("RANK", None)
    return None


def _is_single(environ: Environ) -> bool:
    """Whether RANK and WORLD_SIZE describe a single process. Ranks that it starts must not inherit its RANK."""
    return environ.get("RANK") == "0" and environ.get("WORLD_SIZE", "1") == "1"
