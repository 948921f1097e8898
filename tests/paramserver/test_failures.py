"""What a death costs over real sockets: nothing where others have copies; else the error says what is lost.

That each message may be the last, and that whoever is left goes on, is what the traces and the simulated runs prove.
"""

import dataclasses
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cable import Cable
from ranks import run_apart
from roles import PlainRoles, Roles, until
from torch import Tensor, nn
from training import SGD, Replica, assert_same, batches, specify, train_alone

from cnnstrategies.paramserver.core.view import ServersUnreachableError

STEPS = 12
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.3},
    "pipelined": {"pipelined": True},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 1},
}


def alone(options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of one process."""

    def clip(parameters: list[Tensor]) -> None:
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(parameters, options["clip_norm"])

    return run_apart(train_alone, SGD, batches(STEPS, 12), clip)[0]


def trained(connect: Callable[..., Any], id: int, shares: list[slice], before: Callable[[int], object]) -> Any:
    """The weights after some steps; something may be done before each of the first worker's."""
    replica = Replica(connect, SGD)
    replica.worker.initialise()
    replica.worker.join()
    for step, (images, targets) in enumerate(batches(STEPS, 12)):
        if id == 0:
            before(step)
        replica.step(images[shares[id]], targets[shares[id]])
    replica.worker.wait_all()
    replica.worker.leave()
    return replica.network.state_dict()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_with_two_copies_a_servers_death_changes_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    """One of two servers dies, is replaced, and then the other one dies; in common steps there are two workers."""
    workers = 1 if "mode" in options else 2
    shares = [slice(0, 5), slice(5, 12)] if workers == 2 else [slice(0, 12)]
    expected = alone(options)
    with Roles(tmp_path, specify(SGD, workers, servers=2, replication=2, **options)) as run:

        def deaths(step: int) -> None:
            if step == 3:
                run.lose(0)
            elif step == 5:
                run.serve_again(0)
                until(lambda: run.is_filled(0))
            elif step == 8:
                run.lose(1)

        results = run.train(trained, shares, deaths)
    for network in results:
        assert_same(network, expected)


@pytest.mark.light
def test_a_server_that_is_lost_without_a_copy_is_named(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, (40, 30), servers=2, timeout=1.5) as run:
        worker, _ = run.joined()
        run.step(worker)
        run.lose(1)
        with pytest.raises(ServersUnreachableError, match=r"server 1 died, and .* slices of the parameters with it"):
            run.step(worker)


def test_servers_that_do_not_reach_each_other_are_named(tmp_path: Path) -> None:
    hole = socket.socket(socket.AF_UNIX)
    hole.bind(str(tmp_path / "hole"))
    hole.listen()
    with PlainRoles(tmp_path, servers=2, replication=2, mode="async", timeout=1.5) as run:
        there, elsewhere = run.view.servers
        deaf = dataclasses.replace(elsewhere, endpoint=f"ipc://{tmp_path}/hole")
        run.view = dataclasses.replace(run.view, number=2)
        run.show("server-0", dataclasses.replace(run.view, servers=(there, deaf)))
        run.show("server-1", run.view)
        worker, _ = run.joined()
        with pytest.raises(ServersUnreachableError, match=r"server 1 has heard nothing from server 0 for 3 s"):
            run.step(worker)


def lay_cables(run: Roles) -> list[Cable]:
    """Have everyone reach the servers over cables."""
    cables = [Cable(run.directory / f"cable-{info.id}", info.endpoint) for info in run.view.servers]
    behind = zip(run.view.servers, cables, strict=True)
    run.publish(servers=tuple(dataclasses.replace(info, endpoint=cable.endpoint) for info, cable in behind))
    return cables


@pytest.mark.parametrize(("back", "what"), [(True, "contents"), (False, "length")], ids=["from a server", "to one"])
def test_a_byte_that_changes_on_its_way_costs_a_connection(back: bool, what: str, tmp_path: Path) -> None:
    """Two workers, and servers that have copies of each other's slices; each cable changes one byte of one of them."""
    options: dict[str, Any] = {"servers": 2, "replication": 2, "clip_norm": 0.3}
    expected = alone(options)
    with Roles(tmp_path, specify(SGD, 2, timeout=6.0, **options), encrypted=True) as run:
        cables = lay_cables(run)

        def change(step: int) -> None:
            if step == 3:
                for cable in cables:
                    cable.change(back, what)

        results = run.train(trained, [slice(0, 5), slice(5, 12)], change)
    assert all(cable.has_changed() for cable in cables)
    for network in results:
        assert_same(network, expected)


@pytest.mark.light
def test_the_optimizer_state_is_whole_if_a_server_dies_then(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, (40, 30), servers=2, replication=2) as run:
        worker, _ = run.joined()
        run.step(worker)
        run.kill(0)
        threading.Timer(0.1, run.publish, kwargs={"servers": run.view.servers[1:]}).start()
        state = worker.optimizer_state()["state"]
    assert [entry["momentum_buffer"].tolist() for entry in state.values()] == [[1.0] * 40, [1.0] * 30]


@pytest.mark.light
def test_a_worker_that_left_hears_of_a_server_without_values(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, mode="ssp", staleness=2) as run:
        worker, _ = run.joined()
        run.step(worker)
        worker.leave()
        run.kill(0)
        threading.Timer(0.1, run.serve_again, args=(0,)).start()
        with pytest.raises(ServersUnreachableError, match="server 0 was started again, but its slices"):
            worker.refresh()
