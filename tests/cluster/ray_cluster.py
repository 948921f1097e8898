"""A real Ray cluster of several raylets on this machine.

As a program it starts a head without CPUs and as many nodes as it is told, prints the address, puts a new node in the
place of each whose raylet's number it reads, and ends all with its input.
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
    """Why there can be no Ray cluster here; None where there can."""
    if sys.platform != "linux":
        return "looks for a node's processes in /proc"
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed: pip install '.[ray]', or make test-ray"
    return None


class RayCluster:
    """A running cluster.

    Attributes:
        address: For ``ray.init``.
    """

    def __init__(self, program: "subprocess.Popen[str]") -> None:
        self._program = program
        self.address = self._said()

    def replace(self, raylet: int) -> None:
        """Kill a node with all its processes, and add another one."""
        assert self._program.stdin is not None
        print(raylet, file=self._program.stdin, flush=True)
        self._said()

    def _said(self) -> str:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "RAYCLUSTER":
                return rest
        raise AssertionError(f"Ray's cluster has ended with {self._program.wait()}")


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """Start a cluster; end it afterwards."""
    # Ray's sockets lie below, and a path of theirs has at most 107 characters.
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

    Path("/tmp/ray").mkdir(exist_ok=True)  # Where it notes the address, whatever `temp_dir` says.
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
    (node,) = [one for one in cluster.worker_nodes if one.all_processes["raylet"][0].process.pid == raylet]
    workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    for process in (raylet, *map(int, workers)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
