"""The driver of a run on Ray, tested without Ray: nodes are threads of this process and run shell commands."""

import concurrent.futures
import re
import signal
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.ray import connection, driver, node
from cnnstrategies.cluster.ray.driver import Driver
from cnnstrategies.errors import ConfigurationError


class ActorError(Exception):
    """An error in place of Ray's error for an actor that has died."""


class Actor:
    """A simulated actor in this process; each call of `method.remote` runs in a thread."""

    def __init__(self, cluster: "FakeRay", number: int, foreign: tuple[str, ...]) -> None:
        self.cluster, self.number = cluster, number
        self.node: Any = node.Node(foreign)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name == "run":
                arguments[2]["START"] = str(self.number // 2)
            result = getattr(self.node, name)(*arguments)
            if name == "run" and self.number in self.cluster.loses:
                raise ActorError
            return result

        def remote(*arguments: Any) -> "Future[Any]":
            if name == "answer" and self.number in self.cluster.silent:
                return Future()
            return self.cluster.pool.submit(call, *arguments)

        return SimpleNamespace(remote=remote)


class FakeRay:
    """A simulation of the part of Ray that the driver uses; nodes are available at once.

    Attributes:
        loses: Numbers of actors, counted over all starts, whose node dies when its program ends.
        silent: Numbers of actors that do not answer.
        groups: Number of existing placement groups.
    """

    def __init__(self, loses: tuple[int, ...] = (), silent: tuple[int, ...] = (), free: bool = True) -> None:
        self.loses, self.silent, self.free, self.groups = loses, silent, free, 0
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.pool = ThreadPoolExecutor(16)
        self.exceptions = SimpleNamespace(RayActorError=ActorError)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **arguments: None)
        self.util = SimpleNamespace(
            placement_group=self.group, remove_placement_group=self.remove, scheduling_strategies=strategies
        )
        self.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)

    def group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.groups += 1
        return SimpleNamespace(wait=lambda seconds: self.free)

    def remove(self, group: Any) -> None:
        self.groups -= 1

    def remote(self, cls: type) -> Any:
        def make(foreign: tuple[str, ...]) -> Actor:
            self.actors.append(Actor(self, len(self.actors), foreign))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **arguments: SimpleNamespace(remote=make))

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        wanted = "FIRST_COMPLETED" if num_returns == 1 else "ALL_COMPLETED"
        done, waiting = concurrent.futures.wait(references, timeout, wanted)
        return list(done), list(waiting)

    def get(self, references: Any) -> Any:
        return [reference.result() for reference in references] if isinstance(references, list) else references.result()

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)
        if (program := getattr(actor.node, "program", None)) is not None:
            program.kill()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(driver, "FOLLOW", 0.05)
    monkeypatch.setattr(driver, "PATIENCE", 0.3)
    monkeypatch.setattr(driver, "LOSS", 0.3)
    Path("digits").mkdir()
    Path("digits/config.yaml").touch()


def run(ray: FakeRay, capsys: pytest.CaptureFixture[str], script: str, probe: str = "true") -> tuple[int, str]:
    """Run the driver, and return its exit code and its output."""
    made = Driver(
        *(2, {"CPU": 1.0}, script, probe, Path("digits").absolute(), "digits/config.yaml", "."),
        {"OMP_NUM_THREADS": "3"},
        *(("SLURM_*", "WORLD_SIZE"), 1, 0.0, 10.0, False),
    )
    try:
        code = made.run(ray)
    finally:
        assert ray.killed == ray.actors
        assert ray.groups == 0
    return code, capsys.readouterr().out


def test_failures_are_retried_as_often_as_allowed_and_mistakes_are_not(capsys, monkeypatch):
    monkeypatch.setattr(driver, "PATIENCE", 10.0)  # Every program has the time to print its line.
    monkeypatch.setenv("SLURM_PROCID", "7")  # A variable of the launcher that has started Ray.
    monkeypatch.setenv("WORLD_SIZE", "9")
    says = 'echo "called$SLURM_PROCID$WORLD_SIZE with $OMP_NUM_THREADS"; '
    code, log = run(FakeRay(), capsys, says + 'if [ "$NODE_RANK" = 1 ]; then exit 3; fi; exit 1')
    assert code in (1, 3)
    assert log.count("The run restarts (restart 1 of at most 1), because ") == 1
    assert log.count("\ncalled with 3\n") == log.count("\n[node 1] called with 3\n") == 2
    assert "cluster.ray.max_restarts=1" in log.splitlines()[-1]
    code, log = run(FakeRay(), capsys, 'if [ "$NODE_RANK" = 1 ]; then exit 2; fi; exit 1')
    assert code == 2
    assert "restarts" not in log


NODE = r"node 1 \(.+, 127\.0\.0\.1\)"


@pytest.mark.parametrize(
    ("loses", "silent", "failed", "code", "why"),
    [
        ((1,), (), 1, 0, rf"{NODE} was lost"),
        # The lost node is named although another node failed first, even if the other node reports a user's mistake.
        ((), (1,), 0, 1, rf"{NODE} was lost; node 0 then ended with code 1"),
        ((), (1,), 0, 2, rf"{NODE} was lost; node 0 then ended with code 2"),
        ((), (), 0, 7, r"node 0 ended with code 7"),  # A node that answers is not lost.
    ],
)
def test_a_lost_node_ends_the_others_and_all_starts_again(loses, silent, failed, code, why, capsys):
    """At the first start one node fails, and the other node would go on."""
    ray = FakeRay(loses, silent)
    script = '[ "$START" = 0 ] || exit 0; [ "$NODE_RANK" = {} ] && exit {}; exec sleep 1000'
    ended, log = run(ray, capsys, script.format(failed, code))
    assert ended == 0
    assert re.search(rf"The run restarts \(restart 1 of at most 1\), because {why}\n", log), log
    assert ray.actors[1 - failed].node.program.wait() == -signal.SIGKILL


def test_errors_that_prevent_a_start_are_named(capsys, tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"cnnstrategies is not installed on .* \(nothing here\): install it"):
        run(FakeRay(), capsys, "exit 0", probe="echo nothing here; exit 1")
    with pytest.raises(ConfigurationError, match="2 nodes with 1 CPU each were not free within 0 s"):
        run(FakeRay(free=False), capsys, "exit 0")
    Path("digits/config.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"config\.yaml does not exist on .*: set cluster.folder"):
        run(FakeRay(), capsys, "exit 0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "last").write_text(f"{address}\n")
    monkeypatch.setattr(connection, "LAST", tmp_path / "last")
    with pytest.raises(ConnectionRefusedError):  # Raised at once if this machine's last cluster is dead.
        connection.knock("auto")


def test_a_ray_node_is_requested_with_resources_for_all_its_processes():
    options = ClusterOptions(cpus_per_task=4, memory="64G", gpu_type="a100")
    needed = connection.demand(options, Size(2, 8, 8))
    assert needed == {"CPU": 32, "GPU": 8, "accelerator_type:A100": 0.001, "memory": 64 << 30}
    assert connection.demand(ClusterOptions(), Size(2, 3, 0)) == {"CPU": 3}
