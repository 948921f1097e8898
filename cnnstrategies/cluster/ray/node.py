"""The actor on a node: it starts the node's part of the run as a program, and tells what that prints.

Ray sends this class by value, so nothing of the package is imported here: a node without the package can say so.
"""

import codecs
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

# Of a launcher that has started the raylets: its ranks are not those of this run.
FOREIGN = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
PYTHON = "CNNSTRATEGIES_PYTHON"  # Environment variable of the program: the interpreter that runs this node's Ray.
# The kernel ends the program when the actor's process dies, however that comes: the driver may start the run anew.
LEASH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
PIECE = 1 << 16


@dataclass(frozen=True)
class Place:
    """What a node says of itself.

    Attributes:
        host: Its name.
        address: Where other nodes reach it.
        port: A free one.
        missing: Why the run cannot start there; None if it can.
    """

    host: str
    address: str
    port: int
    missing: str | None


class Node:
    """Runs one program at a time.

    Attributes:
        program: The last one; None before the first.
    """

    def __init__(self) -> None:
        self.program: subprocess.Popen[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def look(self, config: str, probe: str) -> Place:
        """Whether the run can start here.

        Args:
            config: The run's configuration.
            probe: A shell script that fails where the package is not installed.
        """
        host, missing = socket.gethostname(), None
        if not os.path.exists(config):
            missing = f"{host} does not see {config}: put cluster.folder on a disk that all nodes see"
        else:
            tried = subprocess.run(["bash", "-c", probe], env=_environment({}), capture_output=True, text=True)
            if tried.returncode != 0:
                said = (tried.stdout + tried.stderr).strip().splitlines()
                missing = (
                    f"{host} has no cnnstrategies ({said[-1] if said else 'not found'}): install it in the "
                    "environment of Ray's nodes, or name another one with cluster.venv or cluster.python"
                )
        with socket.create_server(("", 0)) as server:
            port = int(server.getsockname()[1])
        return Place(host, own_address(), port, missing)

    def start(self, script: str, directory: str, variables: dict[str, str]) -> None:
        """Start the program.

        Args:
            script: For the shell.
            directory: Its working directory, where the node has it; else the actor's own.
            variables: Beside those of the actor.
        """
        self.program = subprocess.Popen(
            [sys.executable, "-c", LEASH, str(os.getpid()), "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory if os.path.isdir(directory) else None,
            env=_environment(variables),
        )

    def follow(self, seconds: float) -> tuple[str, int | None]:
        """What the program has printed since the last call, and its exit code when it has ended.

        Args:
            seconds: How long to wait for either.
        """
        program = self.program
        assert program is not None
        assert program.stdout is not None
        until, file = time.monotonic() + seconds, program.stdout.fileno()
        text = ""
        while not text and time.monotonic() < until:
            code = program.poll()  # Before reading: what it printed last is then in the pipe.
            while select.select([file], [], [], 0 if code is not None else 0.1)[0]:
                piece = os.read(file, PIECE)
                text += self._decoder.decode(piece, final=not piece)
                if not piece or len(text) > PIECE:
                    break
            if code is not None and len(text) <= PIECE:
                return text, code
        return text, None

    def stop(self, signum: int) -> None:
        """Send the program a signal."""
        if self.program is not None:
            with contextlib.suppress(ProcessLookupError):
                self.program.send_signal(signum)


def own_address() -> str:
    """Where other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _environment(variables: dict[str, str]) -> dict[str, Any]:
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(FOREIGN) and name not in FOREIGN_NAMES
    }
    return {**own, PYTHON: sys.executable, **variables}
