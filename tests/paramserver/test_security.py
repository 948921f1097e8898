"""Keys, who may connect, and where encryption may be left out."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from local_cluster import Cluster
from ranks import run_apart
from test_sync import assert_same, shares_of, train
from torch import Tensor
from training import SGD, batches, specify, train_alone

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.client import Worker
from cnnstrategies.paramserver.core.view import ServerInfo
from cnnstrategies.paramserver.errors import ServersUnreachableError
from cnnstrategies.paramserver.file_views import FileViews
from cnnstrategies.paramserver.security import Gatekeeper, KeyPair, check_endpoint
from cnnstrategies.paramserver.transport import Context, Listener, client_socket, server_socket


def test_keys_are_for_their_owner_only_and_never_shown(tmp_path: Path) -> None:
    keys = KeyPair.create()
    keys.save(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert KeyPair.load(tmp_path / "key") == keys
    assert keys.secret not in repr(keys)
    with pytest.raises(FileExistsError):
        keys.save(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigurationError, match="mode 640"):
        KeyPair.load(tmp_path / "key")


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc:///tmp/x", True), ("tcp://127.0.0.1:*", True), ("tcp://[::1]:80", True), ("tcp://localhost:80", True),
        ("tcp://0.0.0.0:80", False), ("tcp://10.0.0.1:80", False), ("tcp://node1:80", False), ("tcp://[::]:80", False),
    ],
)  # fmt: skip
def test_an_open_network_needs_encryption_or_an_explicit_word(endpoint: str, local: bool) -> None:
    check_endpoint(endpoint, encrypted=True)
    check_endpoint(endpoint, encrypted=False, insecure=True)
    if local:
        check_endpoint(endpoint, encrypted=False)
    else:
        with pytest.raises(ConfigurationError, match="security='curve'"):
            check_endpoint(endpoint, encrypted=False)


def test_encrypted_servers_with_copies_train_the_same_model(tmp_path: Path) -> None:
    expected, _ = run_apart(train_alone, SGD, batches(5, 12))
    with Cluster(specify(SGD, 2, servers=2, replication=2), tmp_path, encrypted=True) as cluster:
        cluster.start_workers(train, SGD, shares_of(2, 12), 12)
        for network, _ in cluster.results():
            assert_same(network, expected)


def test_only_who_is_admitted_gets_a_message_through() -> None:
    context: Context = zmq.Context()
    keys, member, stranger = KeyPair.create(), KeyPair.create(), KeyPair.create()
    gatekeeper = Gatekeeper(context, lambda key: key == member.public)
    listener = Listener("tcp://127.0.0.1:*", encrypted=True)
    router = server_socket(context, listener, keys, 1000)
    came = []
    for name, pair in (("stranger", stranger), ("member", member)):
        dealer = client_socket(context, ServerInfo(0, listener.endpoint, keys.public), pair, 1000)
        dealer.send(name.encode())
        assert gatekeeper.socket.poll(5000)
        gatekeeper.answer()
        came += [router.recv_multipart()[1] for _ in range(1) if router.poll(500)]
    refused = gatekeeper.refused
    context.destroy(0)
    assert came == [b"member"]
    assert refused == 1


def test_a_key_that_is_not_the_members_own_gets_nowhere(tmp_path: Path) -> None:
    """Neither a stranger's key, nor that of worker 1 in worker 0's name."""
    specification = specify(SGD, 2, timeout=1.0)

    def intrude(keys: KeyPair) -> Callable[..., Any]:
        def work(connect: Callable[..., Any], id: int) -> None:
            parameters = [torch.zeros(info.shape, dtype=torch.float64) for info in specification.parameters]
            worker = Worker(specification, parameters, FileViews(tmp_path / "view.json"), 0, keys=keys)
            with pytest.raises(ServersUnreachableError, match="no answer from server 0"):
                worker.initialise()

        return work

    def pull(connect: Callable[..., Any], id: int) -> list[Tensor]:
        parameters = [torch.ones(info.shape, dtype=torch.float64) for info in specification.parameters]
        worker = connect(parameters)
        worker.initialise()
        worker.join()
        return parameters

    with Cluster(specification, tmp_path, encrypted=True) as cluster:
        for number, keys in enumerate((KeyPair.create(), cluster.keys["worker-1"])):
            cluster.start_worker(10 + number, intrude(keys))
            cluster.result(10 + number)
        cluster.start_worker(0, pull)
        assert all(torch.equal(value, torch.ones_like(value)) for value in cluster.result(0))
        dropped = cluster.server_report(0)["dropped"]
    assert set(dropped) == {"a key that is not its sender's"}
