"""A real Ray cluster of several raylets on this machine.

As a program, this file starts a head without CPUs and the given number of nodes, and prints the address. When it reads
the process id of a raylet, it replaces the raylet's node by a new node. At the end of its input it ends the cluster.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CPUS = 2


def missing() -> str | None:
    """Return the reason why this machine cannot have a Ray cluster, or None if it can."""
    if sys.platform != "linux":
        return "looks for a node's processes in /proc"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install '.[ray]', or make test-ray"
    return None


class RayCluster:
    """A running cluster.

    Attributes:
        address: Address for ``ray.init``.
    """

    def __init__(self, program: "subprocess.Popen[str]") -> None:
        self._program = program
        self.address = self._answer()

    def replace(self, raylet: int) -> None:
        """Kill the node of a raylet with all its processes, and add a new node."""
        assert self._program.stdin is not None
        print(raylet, file=self._program.stdin, flush=True)
        self._answer()

    def _answer(self) -> str:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "RAYCLUSTER":
                return rest
        raise AssertionError(f"Ray's cluster has ended with {self._program.wait()}")


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """Start a cluster, and end it afterwards."""
    # The paths of Ray's sockets are below this folder, and have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        root = Path(__file__).parents[2]
        program = subprocess.Popen(
            [sys.executable, __file__, str(nodes), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        )
        try:
            yield RayCluster(program)
        finally:
            assert program.stdin is not None
            program.stdin.close()
            program.wait()


def _serve(nodes: int, folder: str) -> None:
    from ray.cluster_utils import Cluster

    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray writes the address here even if `temp_dir` is another folder.
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
    )
    for _ in range(nodes):
        cluster.add_node(num_cpus=CPUS, wait=False)
    cluster.wait_for_nodes(60)
    print(f"RAYCLUSTER {cluster.address}", flush=True)
    for line in sys.stdin:
        _kill(cluster, int(line))
        cluster.add_node(num_cpus=CPUS)
        print("RAYCLUSTER replaced", flush=True)
    cluster.shutdown()


def _kill(cluster: Any, raylet: int) -> None:
    (node,) = [
        candidate for candidate in cluster.worker_nodes if candidate.all_processes["raylet"][0].process.pid == raylet
    ]
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    for process in (raylet, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
