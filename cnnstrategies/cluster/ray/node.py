"""The actor on a node, which runs the node's part of the run as a program.

Ray sends this class by value, and this module imports nothing of the package, so that a node without the package can
report that.
"""

import fnmatch
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

PYTHON = "CNNSTRATEGIES_PYTHON"  # Environment variable of the program: the interpreter that runs this node's Ray.
# Makes the kernel kill the program when the actor's process dies, because the driver may then start the run again.
LEASH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        host: Name of the node.
        address: Address at which other nodes reach it.
        port: A free port.
        missing: Message if the run cannot start on the node, else None.
    """

    host: str
    address: str
    port: int
    missing: str | None


class Node:
    """The actor on a node.

    Args:
        foreign: Patterns of environment variables that programs do not inherit: they describe the launch of a launcher
            that has started Ray itself, whose ranks are not those of this run.
    """

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self.foreign = foreign

    def look(self, config: str, probe: str) -> RayNode:
        """Return this node, after checking whether the run can start on it.

        Args:
            config: The run's configuration, which every node must see.
            probe: Script of the shell that fails if the package is not installed.
        """
        host, missing = socket.gethostname(), None
        if not os.path.exists(config):
            missing = f"{host} does not see {config}: put cluster.folder on a disk that all nodes see"
        else:
            process = subprocess.run(["bash", "-c", probe], env=self._environment({}), capture_output=True, text=True)
            if process.returncode != 0:
                lines = (process.stdout + process.stderr).strip().splitlines()
                missing = (
                    f"{host} has no cnnstrategies ({lines[-1] if lines else 'not found'}): install it in the "
                    "environment of Ray's nodes, or name another environment with cluster.venv or cluster.python"
                )
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        return RayNode(host, own_address(), port, missing)

    def run(self, script: str, directory: str, variables: dict[str, str], log: str) -> int:
        """Run a script of the shell and return its exit code.

        Args:
            script: The script.
            directory: Working directory, if the node has it.
            variables: Environment variables of the script.
            log: File for the script's output.
        """
        with open(log, "ab") as file:
            self.program = subprocess.Popen(
                [sys.executable, "-c", LEASH, str(os.getpid()), "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=directory if os.path.isdir(directory) else None,
                env=self._environment(variables),
            )
        return self.program.wait()

    def stop(self, signum: int) -> None:
        """Send the program a signal."""
        self.program.send_signal(signum)

    def answer(self) -> None:
        """Do nothing: the driver calls this method to learn whether the node is alive."""

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment of a program: this process's, without foreign variables, and `variables`."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.foreign)
        }
        return {**inherited, PYTHON: sys.executable, "PYTHONUNBUFFERED": "1", **variables}


def own_address() -> str:
    """Return the address at which other nodes reach this node."""
    import ray

    return str(ray.util.get_node_ip_address())
