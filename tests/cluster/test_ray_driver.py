"""The driver of a run on Ray, with programs of the shell on nodes that are threads of nobody: no Ray is needed."""

import re
import signal
import socket
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import ClusterOptions, RayOptions
from cnnstrategies.cluster.ray import connection, node
from cnnstrategies.cluster.ray.connection import check_nodes, demand
from cnnstrategies.cluster.ray.driver import Driver
from cnnstrategies.cluster.ray.order import LOSS, PATIENCE, Lines, Order
from cnnstrategies.errors import ConfigurationError

CONFIG = "config.yaml"


class ActorError(Exception):
    """What Ray raises when an actor has died."""


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(eq=False)
class Reference:
    """A question to an actor."""

    answer: Callable[[], Any]
    ready: Callable[[], bool] = lambda: True


class Actor:
    """A node in this process; `method.remote` runs it when its result is asked for."""

    def __init__(self, cluster: "FakeRay") -> None:
        self.node, self.cluster, self.asked = node.Node(), cluster, 0

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Reference:
            if name == "follow":
                return self.cluster.question(self, *arguments)
            value = getattr(self.node, name)(*arguments)
            return Reference(lambda: value)

        return types.SimpleNamespace(remote=remote)


class FakeRay:
    """As much of Ray as the driver uses: nodes that are there at once.

    Attributes:
        loses: Numbers of actors, over all starts, whose node dies as soon as it has printed something.
        silent: Numbers of actors whose node dies with an answer under way, which comes when another program has failed;
            and the time at which Ray knows.
        unavailable: Whether Ray says until then that it cannot reach them.
        pace: Seconds that an answer takes by the clock.
        killed: Number of actors that the driver has ended.
        groups: Placement groups that are there.
    """

    def __init__(
        self,
        loses: tuple[int, ...] = (),
        free: bool = True,
        silent: Mapping[int, float] = types.MappingProxyType({}),
        unavailable: bool = False,
        pace: float = 0.0,
    ) -> None:
        self.loses, self.free, self.killed, self.groups, self.actors = loses, free, 0, 0, []
        self.silent, self.unavailable, self.pace, self.clock, self.failed = silent, unavailable, pace, Clock(), False
        self.exceptions = types.SimpleNamespace(RayActorError=ActorError, ActorUnavailableError=ConnectionError)
        strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda **arguments: None)
        self.util = types.SimpleNamespace(
            placement_group=self.group, remove_placement_group=self.remove, scheduling_strategies=strategies
        )
        self.cloudpickle = types.SimpleNamespace(register_pickle_by_value=lambda module: None)

    def group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.groups += 1

        def wait(seconds: float) -> bool:
            self.clock.now += 0.0 if self.free else seconds
            return self.free

        return types.SimpleNamespace(wait=wait)

    def remove(self, group: Any) -> None:
        self.groups -= 1

    def remote(self, cls: type) -> Any:
        def make() -> Actor:
            self.actors.append(Actor(self))
            return self.actors[-1]

        return types.SimpleNamespace(options=lambda **arguments: types.SimpleNamespace(remote=make))

    def question(self, actor: Actor, seconds: float) -> Reference:
        number = self.actors.index(actor)
        if number not in self.silent:
            return Reference(lambda: self.follow(actor, number, 0.02 if self.pace else seconds))
        actor.asked += 1
        if actor.asked == 1:
            return Reference(lambda: ("", None), lambda: self.failed)
        return Reference(lambda: self.lost(number), lambda: self.unavailable or self.clock.now >= self.silent[number])

    def follow(self, actor: Actor, number: int, seconds: float) -> tuple[str, int | None]:
        text, code = actor.node.follow(seconds)
        self.clock.now += self.pace
        self.failed = self.failed or bool(code)
        if text and number in self.loses:
            raise ActorError
        return text, code

    def lost(self, number: int) -> Any:
        raise ActorError if self.clock.now >= self.silent[number] else ConnectionError

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [reference for reference in references if reference.ready()][:1]
        if not ready:
            self.clock.now += timeout
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference: Reference) -> Any:
        return reference.answer()

    def kill(self, actor: Actor) -> None:
        self.killed += 1
        program = actor.node.program
        if program is not None:
            program.kill()
            program.wait()


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "own_address", lambda: "127.0.0.1")
    Path(CONFIG).touch()


def run(ray: FakeRay, script: str, probe: str = "true", restarts: int = 1, wait: float = 0.0) -> tuple[int, str]:
    order = Order(
        *(2, {"CPU": 1.0}, script, probe, CONFIG, "digits", ".", {"OMP_NUM_THREADS": "3"}),
        *(restarts, wait, 10.0, False),
    )
    lines = Lines(Path("run.log"))
    try:
        code = Driver(ray, order, lines, ray.clock).run()
    finally:
        lines.close()
    assert ray.killed == len(ray.actors)
    assert ray.groups == 0
    return code, Path("run.log").read_text()


def test_each_node_has_its_rank_and_the_first_ones_address_and_no_other_launchers(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    code, log = run(
        FakeRay(), 'echo "is $NODE_RANK of $MASTER_ADDR:$MASTER_PORT $OMP_NUM_THREADS $SLURM_PROCID$WORLD_SIZE."'
    )
    assert code == 0
    first, second = sorted(line for line in log.splitlines() if "is" in line)[-1], log
    port = first.partition("127.0.0.1:")[2].split()[0]
    assert f"is 0 of 127.0.0.1:{port} 3 .\n" in second
    assert f"[node 1] is 1 of 127.0.0.1:{port} 3 .\n" in second


def test_a_failure_is_tried_again_under_the_same_name_as_often_as_allowed():
    says = 'echo "$CNNSTRATEGIES_RUN_NAME $CNNSTRATEGIES_RUN_STARTS"; '
    code, log = run(FakeRay(), says + 'if [ "$NODE_RANK" = 1 ]; then exit 3; fi; exit 1')
    assert code in (1, 3)
    assert log.count("The run starts again (1 of at most 1): ") == 1
    assert {line.split()[-1] for line in log.splitlines() if "digits" in line} == {"0", "1"}
    assert "cluster.ray.max_restarts=1" in log.splitlines()[-1]


def test_a_mistake_in_the_configuration_is_not_tried_again():
    code, log = run(FakeRay(), 'if [ "$NODE_RANK" = 1 ]; then exit 2; fi; exit 1')
    assert code == 2
    assert "starts again" not in log


def test_when_a_node_is_lost_the_others_programs_are_ended_at_once_and_all_starts_again():
    ray = FakeRay(loses=(1,))
    second = "if [ -e once$NODE_RANK ]; then exit 0; fi; touch once$NODE_RANK"
    code, log = run(ray, f"{second}; until [ -e once0 ]; do sleep 0.02; done; echo on; exec sleep 1000")
    assert code == 0
    assert "(1 of at most 1): node 1 (" in log
    assert [actor.node.program.returncode for actor in ray.actors] == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]


NODE = r"node 1 \(.+, 127\.0\.0\.1\)"
# At the first start node 0 fails, and node 1 goes on.
FIRST_FAILS = '[ "$CNNSTRATEGIES_RUN_STARTS" = 0 ] || exit 0; [ "$NODE_RANK" = 1 ] || exit {}; exec sleep 1000'


@pytest.mark.parametrize("unavailable", [False, True])
@pytest.mark.parametrize("code", [1, 2])
def test_the_lost_node_is_named_though_another_has_failed_for_it_before_ray_knows(code: int, unavailable: bool):
    """Also where the other says that it was started wrongly, since nobody came."""
    ray = FakeRay(silent={1: LOSS - 10}, unavailable=unavailable)
    ended, log = run(ray, FIRST_FAILS.format(code))
    assert ended == 0
    assert re.search(rf"\(1 of at most 1\): {NODE} was lost; node 0 then ended with code {code}\n", log), log
    assert "for Ray to say whether it has lost node 1 (" in log


def test_ray_is_asked_about_a_node_for_a_bounded_time_and_not_about_one_that_answers():
    ray = FakeRay(silent={1: 10 * LOSS})
    _, log = run(ray, FIRST_FAILS.format(1))
    assert re.search(rf"\(1 of at most 1\): {NODE} does not answer; node 0 then ended with code 1\n", log), log
    _, log = run(FakeRay(pace=PATIENCE / 4), FIRST_FAILS.format(7))
    assert "(1 of at most 1): node 0 ended with code 7\n" in log, log
    assert log.count("for Ray to say") == 1, log  # Of the first run.


def test_a_node_without_the_package_and_a_cluster_that_is_not_free_are_told():
    with pytest.raises(ConfigurationError, match=r"has no cnnstrategies \(nothing here\): install it"):
        run(FakeRay(), "exit 0", probe="echo nothing here; exit 1")
    with pytest.raises(ConfigurationError, match="2 nodes with 1 CPU each were not free for 0 s"):
        run(FakeRay(free=False), "exit 0")
    Path(CONFIG).unlink()
    with pytest.raises(ConfigurationError, match=r"does not see config\.yaml: put cluster.folder on a disk"):
        run(FakeRay(), "exit 0")


def test_a_cluster_of_this_machine_that_has_died_is_not_waited_for(tmp_path, monkeypatch):
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
