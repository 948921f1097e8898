"""The driver of a run on Ray, with programs of the shell on nodes that are threads here: no Ray is needed."""

import concurrent.futures
import re
import signal
import socket
import types
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import ClusterOptions, RayOptions
from cnnstrategies.cluster.ray import connection, driver, node
from cnnstrategies.cluster.ray.connection import check_nodes, demand
from cnnstrategies.cluster.ray.driver import Driver, Order
from cnnstrategies.errors import ConfigurationError


class ActorError(Exception):
    """What Ray raises when an actor has died."""


class Actor:
    """A node in this process: each call of `method.remote` has a thread."""

    def __init__(self, cluster: "FakeRay", number: int) -> None:
        self.cluster, self.number = cluster, number
        self.node: Any = node.Node()

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> "Future[Any]":
            if name == "answer" and self.number in self.cluster.silent:
                return Future()
            return self.cluster.pool.submit(self.call, name, arguments)

        return types.SimpleNamespace(remote=remote)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        result = getattr(self.node, name)(*arguments)
        if name == "run" and self.number in self.cluster.loses:
            raise ActorError
        return result


class FakeRay:
    """As much of Ray as the driver uses: nodes that are there at once.

    Attributes:
        loses: Numbers of actors, over all starts, whose node dies with its program.
        silent: Numbers of actors that do not answer any more.
        groups: Placement groups that are there.
    """

    def __init__(self, loses: tuple[int, ...] = (), silent: tuple[int, ...] = (), free: bool = True) -> None:
        self.loses, self.silent, self.free, self.groups = loses, silent, free, 0
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self.pool = ThreadPoolExecutor(16)
        self.exceptions = types.SimpleNamespace(RayActorError=ActorError)
        strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **arguments: None)
        self.util = types.SimpleNamespace(
            placement_group=self.group, remove_placement_group=self.remove, scheduling_strategies=strategies
        )
        self.cloudpickle = types.SimpleNamespace(register_pickle_by_value=lambda module: None)

    def group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.groups += 1
        return types.SimpleNamespace(wait=lambda seconds: self.free)

    def remove(self, group: Any) -> None:
        self.groups -= 1

    def remote(self, cls: type) -> Any:
        def make() -> Actor:
            self.actors.append(Actor(self, len(self.actors)))
            return self.actors[-1]

        return types.SimpleNamespace(options=lambda **arguments: types.SimpleNamespace(remote=make))

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        wanted = "FIRST_COMPLETED" if num_returns == 1 else "ALL_COMPLETED"
        done, waiting = concurrent.futures.wait(references, timeout, wanted)
        return list(done), list(waiting)

    def get(self, references: Any) -> Any:
        return [one.result() for one in references] if isinstance(references, list) else references.result()

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


def run(
    ray: FakeRay, capsys: pytest.CaptureFixture[str], script: str, probe: str = "true", wait: float = 0.0
) -> tuple[int, str]:
    """The exit code, and what the driver has printed."""
    order = Order(
        *(2, {"CPU": 1.0}, script, probe, Path("digits").absolute(), ".", {"OMP_NUM_THREADS": "3"}),
        *(1, wait, 10.0, False),
    )
    try:
        code = Driver(ray, order).run()
    finally:
        assert ray.killed == ray.actors
        assert ray.groups == 0
    return code, capsys.readouterr().out


def test_each_node_has_its_rank_and_the_first_ones_address(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    script = 'printf "is $NODE_RANK of $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $SLURM_PROCID$WORLD_SIZE."'
    code, log = run(FakeRay(), capsys, script)
    assert code == 0
    port = log.partition("127.0.0.1:")[2].split()[0]
    assert f"\nis 0 of 127.0.0.1:{port} 3 .\n" in log
    assert f"\n[node 1] is 1 of 127.0.0.1:{port} 3 .\n" in log


def test_a_failure_is_retried_as_often_as_allowed_and_no_mistake(capsys):
    says = 'echo "$CNNSTRATEGIES_RUN_NAME $CNNSTRATEGIES_RUN_STARTS"; '
    code, log = run(FakeRay(), capsys, says + 'if [ "$NODE_RANK" = 1 ]; then exit 3; fi; exit 1')
    assert code in (1, 3)
    assert log.count("The run starts again (1 of at most 1): ") == 1
    assert {line.split()[-1] for line in log.splitlines() if "digits" in line} == {"0", "1"}
    assert "cluster.ray.max_restarts=1" in log.splitlines()[-1]
    code, log = run(FakeRay(), capsys, 'if [ "$NODE_RANK" = 1 ]; then exit 2; fi; exit 1')
    assert code == 2
    assert "starts again" not in log


NODE = r"node 1 \(.+, 127\.0\.0\.1\)"
# At the first start the one node fails, and the other goes on.
FAILS = '[ "$CNNSTRATEGIES_RUN_STARTS" = 0 ] || exit 0; [ "$NODE_RANK" = {} ] && exit {}; exec sleep 1000'


def test_a_lost_node_ends_the_others_and_all_starts_again(capsys):
    ray = FakeRay(loses=(1,))
    code, log = run(ray, capsys, FAILS.format(1, 0))
    assert code == 0
    assert re.search(rf"\(1 of at most 1\): {NODE} was lost\n", log), log
    assert ray.actors[0].node.program.wait() == -signal.SIGKILL


def test_the_lost_node_is_named_though_another_failed_first(capsys):
    """Also where the other says that it was started wrongly, since nobody came; one that answers is not lost."""
    for code in (1, 2):
        ended, log = run(FakeRay(silent=(1,)), capsys, FAILS.format(0, code))
        assert ended == 0
        assert re.search(rf"\(1 of at most 1\): {NODE} was lost; node 0 then ended with code {code}\n", log), log
    _, log = run(FakeRay(), capsys, FAILS.format(0, 7))
    assert "(1 of at most 1): node 0 ended with code 7\n" in log, log


def test_a_node_without_package_and_a_busy_cluster_are_told(capsys):
    with pytest.raises(ConfigurationError, match=r"has no cnnstrategies \(nothing here\): install it"):
        run(FakeRay(), capsys, "exit 0", probe="echo nothing here; exit 1")
    with pytest.raises(ConfigurationError, match="2 nodes with 1 CPU each were not free for 0 s"):
        run(FakeRay(free=False), capsys, "exit 0")
    Path("digits/config.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"does not see .*config\.yaml: put cluster.folder on a disk"):
        run(FakeRay(), capsys, "exit 0")


def test_a_dead_cluster_of_this_machine_is_not_waited_for(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "last").write_text(f"{address}\n")
    monkeypatch.setattr(connection, "LAST", tmp_path / "last")
    with pytest.raises(ConnectionRefusedError):
        connection.knock("auto")


def test_a_node_is_asked_for_what_all_its_processes_need():
    options = ClusterOptions(cpus_per_task=4, memory="64G", gpu_type="a100")
    needed = demand(options, Size(2, 8, 8))
    assert needed == {"CPU": 32, "GPU": 8, "accelerator_type:A100": 0.001, "memory": 64 << 30}
    assert demand(ClusterOptions(), Size(2, 3, 0)) == {"CPU": 3}
    with pytest.raises(ConfigurationError, match=r"cluster\.memory='much'"):
        demand(ClusterOptions(memory="much"), Size(1, 1, 0))
    nodes = [{"Alive": alive, "Resources": {"CPU": cpus}} for alive, cpus in ((True, 4), (True, 2), (False, 4))]
    check_nodes(nodes, 1, {"CPU": 4})
    with pytest.raises(ConfigurationError, match="needs 2 nodes with 4 CPUs each, and 1 of the cluster's 2 have that"):
        check_nodes(nodes, 2, {"CPU": 4})
    for values in ({"max_restarts": -1}, {"wait": 0}):
        with pytest.raises(ConfigurationError, match=f"cluster.ray.{next(iter(values))}="):
            RayOptions(**values)
