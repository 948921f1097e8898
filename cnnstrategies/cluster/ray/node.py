"""Actor that runs a program on a node of a Ray cluster.

Ray pickles the actor's class by value, and this module does not import the package. A node on which the package is not
installed can therefore run the actor, which reports that the package is missing.
"""

import fnmatch
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

PYTHON = "CNNSTRATEGIES_PYTHON"  # Environment variable for the program: path of the interpreter that runs Ray.
# Program that asks the kernel to kill it when the actor's process dies, and then becomes the node's program. Otherwise
# the node's program could still run when the driver restarts the run.
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
        host: Host name of the node.
        address: IP address at which other nodes reach this node.
        port: A free port on the node.
        missing: Error message if the run cannot start on the node; otherwise None.
    """

    host: str
    address: str
    port: int
    missing: str | None


class Node:
    """Actor on a node of a Ray cluster.

    Args:
        foreign: Patterns for names of environment variables that the program must not inherit. If a launcher such as
            SLURM has started Ray, the launcher's variables describe ranks that do not belong to this run.
    """

    def __init__(self, foreign: tuple[str, ...]) -> None:
        self.foreign = foreign

    def look(self, config: str, probe: str) -> RayNode:
        """Check whether the run can start on this node, and return a description of the node.

        Args:
            config: Path of the run's configuration, which must exist on every node.
            probe: Shell script that fails if the package is not installed.
        """
        host, missing = socket.gethostname(), None
        if not os.path.exists(config):
            missing = f"{config} does not exist on {host}: set cluster.folder to a directory that all nodes share"
        else:
            process = subprocess.run(["bash", "-c", probe], env=self._environment({}), capture_output=True, text=True)
            if process.returncode != 0:
                lines = (process.stdout + process.stderr).strip().splitlines()
                missing = (
                    f"cnnstrategies is not installed on {host} ({lines[-1] if lines else 'not found'}): install it in "
                    "the environment that runs Ray, or set cluster.venv or cluster.python to another environment"
                )
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        return RayNode(host, own_address(), port, missing)

    def run(self, script: str, directory: str, variables: dict[str, str], log: str) -> int:
        """Run a shell script, wait for its end, and return its exit code.

        Args:
            script: The shell script.
            directory: Working directory of the script, if this directory exists on the node.
            variables: Environment variables for the script.
            log: Path of the file to which the script's output is appended.
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
        """Send a signal to the program that the actor has started."""
        self.program.send_signal(signum)

    def answer(self) -> None:
        """Do nothing. The driver calls this to find out whether the node is alive."""

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment variables for a program.

        The program gets ``variables``, and all variables of this process that do not match the patterns ``foreign``.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.foreign)
        }
        return {**inherited, PYTHON: sys.executable, "PYTHONUNBUFFERED": "1", **variables}


def own_address() -> str:
    """Return the IP address at which other nodes reach this node."""
    import ray

    return str(ray.util.get_node_ip_address())
