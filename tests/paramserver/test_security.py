"""Keys, permission to connect, and the places where encryption may be left out."""

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver import supervision
from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.coordinator.status import WATCHER
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.core.view import ServersUnreachableError
from cnnstrategies.paramserver.drivers.control import encode
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.drivers.sockets import secure
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import Watcher
from cnnstrategies.paramserver.private_directory import (
    PREFIX,
    hold,
    let_go,
    make_run_directory,
    shared_directory,
    temporary_place,
)
from cnnstrategies.paramserver.security import KeyPair, check_endpoint, fingerprint, prove
from cnnstrategies.paramserver.supervision import Supervision
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.run import NodeLayout, choose_rendezvous, open_supervision
from tests.paramserver.control_world import Run
from tests.paramserver.roles import Roles, join, until
from tests.paramserver.training import SGD, specify


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


def test_any_network_needs_encryption_or_explicit_permission() -> None:
    check_endpoint("ipc:///tmp/x", encrypted=False)
    for host in ("127.0.0.1:*", "[::1]:80", "localhost:80", "0.0.0.0:80", "10.0.0.1:80", "node1:80", "[::]:80"):
        check_endpoint(f"tcp://{host}", encrypted=True)
        check_endpoint(f"tcp://{host}", encrypted=False, insecure=True)
        with pytest.raises(ConfigurationError, match="security='curve'"):
            check_endpoint(f"tcp://{host}", encrypted=False)


def test_a_process_without_the_members_own_key_is_refused(tmp_path: Path) -> None:
    """Use a stranger's key, with which a connection is refused, and worker 1's key in the name of worker 0."""
    with Roles(tmp_path, specify(SGD, 2), encrypted=True) as run:
        impatient = replace(run.specification, timeout=0.3)
        worker, values = run.worker()
        for keys, dropped in (
            (KeyPair.create(), set()),
            (run.keys["worker-1"], {"the connection's key is not the sender's key"}),
        ):
            intruder = Worker(impatient, values, run.views("worker-0"), 0, keys=keys)
            with pytest.raises(ServersUnreachableError, match="no answer from server 0"):
                intruder.join()
            intruder.close()
            assert set(run.servers[0].role.dropped) == dropped
        join([worker])


# Strangers


ONE_NODE = NodeLayout(1, 0, 2, "127.0.0.1", 29500)
TWO_NODES = replace(ONE_NODE, nodes=2)


@pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one node", "two on the loopback"])
@pytest.mark.parametrize("started", ["by fit", "by torchrun, mpirun or SLURM"])
def test_no_endpoint_can_be_reached_without_a_key(
    layout: NodeLayout, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", tempfile.mkdtemp(dir="/tmp"))
    options = ParameterServerStrategy().options
    places = [choose_rendezvous(options, layout, 0, supervised=started == "by fit") for _ in range(2)]
    for place in places:
        assert place.coordinator.startswith("ipc://") or place.key_file is not None
        directory = (
            Path(place.directory or str(place.key_file)).parent if place.directory is None else Path(place.directory)
        )
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        if place.key_file is not None:
            assert stat.S_IMODE(Path(place.key_file).stat().st_mode) == 0o600
    if started != "by fit":
        assert places[0] == places[1], "all ranks of a machine use the same coordinator"
    open_to_all = choose_rendezvous(ParameterServerStrategy(security="none").options, TWO_NODES, 0)
    assert open_to_all.key_file is None


def test_an_impossible_address_is_named_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"'tcp://127.0.0.1:99999': use a port from 1 to 65535"):
        ParameterServerStrategy(coordinator="tcp://127.0.0.1:99999")
    nowhere = ParameterServerStrategy(coordinator="tcp://nowhere.invalid:5000", security="none").options
    place = choose_rendezvous(nowhere, ONE_NODE, 0, supervised=True)
    with pytest.raises(
        ConfigurationError,
        match=r"cannot be reached from this machine .* by which other machines reach rank 0's machine",
    ):
        open_supervision(nowhere, ONE_NODE, place, False, "fork")
    with socket.create_server(("127.0.0.1", 0)) as other:
        coordinator = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        options = ParameterServerStrategy(coordinator=coordinator).options
        place = choose_rendezvous(options, ONE_NODE, 0, supervised=True)
        with pytest.raises(
            ConfigurationError, match=rf"{coordinator}: port .* of this machine cannot be used .* in use"
        ):
            open_supervision(options, ONE_NODE, place, True, "fork")


def test_a_directory_that_somebody_else_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", tempfile.mkdtemp(dir="/tmp"))
    path = shared_directory("here")
    let_go(path)
    assert not path.exists(), "the last process has removed the directory"
    for make in (lambda: path.mkdir(0o755), lambda: path.symlink_to(tmp_path)):
        make()
        with pytest.raises(ConfigurationError, match="is not a directory that only this user can enter"):
            shared_directory("here")
        path.unlink() if path.is_symlink() else path.rmdir()
    path.mkdir(0o700)
    other = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(ConfigurationError, match="is not a directory that only this user can enter"):
        hold(path)


def test_a_directory_stays_while_an_unseen_process_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only a lock: a process in a container with the same temporary directory is not visible otherwise."""
    monkeypatch.setattr("tempfile.tempdir", tempfile.mkdtemp(dir="/tmp"))
    used, unused = (temporary_place() / f"{PREFIX}99999999-{name}" for name in ("used", "unused"))
    for path in (used, unused):
        path.mkdir(0o700)
        (path / "lock").touch()
    with open(used / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        run = make_run_directory()
        assert used.exists()
        assert not unused.exists()
    let_go(run)


def test_a_stranger_of_protocol_version_one_ends_no_process(tmp_path: Path) -> None:
    """Open many connections: if libzmq accepts that version, one in some hundreds of them ends the process."""
    words = bytes([128, *[0] * 200])  # A routing id, and bytes that are not a frame.
    with Roles(tmp_path, specify(SGD, 1, servers=1)):
        for _ in range(4000):
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.connect(str(tmp_path / "0"))
                stranger.sendall(words)


ABOUT: dict[str, Any] = {"session": 0, "floor": 0, "process": 1, "host": "", "endpoint": ""}
PLACES = [
    Peer(role, number, incarnation)
    for role in ("worker", "server", "supervision")
    for number in (0, 1)
    for incarnation in (0, 1)
]


KINDS = [
    *("beat", "leave", "over", "end", "stop", "status", "died", "put", "get", "signal", "collect", "epoch", "take"),
    *("probe", "watch"),
]
CONTENTS: dict[str, Any] = ABOUT | {
    "message": "said a stranger", "clean": True, "members": [["worker", 0]], "role": "worker", "id": 0,
    "incarnation": 0, "how": "died", "replaced": False, "signal": 15, "sequence": 0, "operation": "x", "seal": True,
    "here": 0, "seen": 0, "epoch": 0, "samples": 1, "chunk": 1, "processed": 0, "ordinal": 1, "ids": [1, 2],
}  # fmt: skip


def forged_messages(known: int) -> list[tuple[Peer, Message]]:
    """Return every kind of message in the name of every member, with guessed process numbers and the known one."""
    names = [*(peer._replace(process=process) for peer in PLACES for process in (0, 1, known)), Peer(WATCHER, 0, 0, 1)]
    hello = Message("hello", CONTENTS | {"public_key": KeyPair.create().public}, (), 1)
    messages = [hello, *(Message(kind, CONTENTS, (), 1) for kind in KINDS)]
    return [(name, message) for message in messages for name in names]


@pytest.mark.parametrize("key", ["a stranger's", "the run's", "a member's own"])
def test_nobody_can_send_messages_in_the_name_of_a_member(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send messages with a member's process number, as if an attacker had overheard it."""
    monkeypatch.setattr(supervision, "ANSWER_SECONDS", 60.0)
    keys = KeyPair.create()
    watch = Supervision(Address("", "supervision", 0), keys)
    settings = CoordinatorSettings("tcp://127.0.0.1:*", 1, 1, 60.0, supervisor=watch.process)
    over = threading.Event()
    with CoordinatorService(settings, keys) as service, contextlib.ExitStack() as at_last, zmq.Context() as context:
        role = service.loop.role
        assert isinstance(role, Coordinator)
        thread = threading.Thread(target=service.run, args=(over.is_set,), daemon=True)
        thread.start()
        at_last.callback(thread.join)
        at_last.callback(over.set)
        membership = Membership(Address(service.endpoint, "worker", 0, 0, 0.1, 60.0), keys=keys)
        membership.wait_registered()
        (victim,) = role.roster.members
        liar_keys = keys if key == "the run's" else KeyPair.create()
        # A stranger uses a member's proof, as if it had overheard the proof.
        proof = prove(keys, victim.public_key if key == "a stranger's" else liar_keys.public)
        liar = context.socket(zmq.DEALER)
        secure(liar, liar_keys, keys.public)
        liar.connect(service.endpoint)
        liar.send_multipart([b"", b"in two parts"])  # Invalid: a message is one frame.
        claims = forged_messages(victim.peer.process)
        if key == "a stranger's":
            me = Peer("server", 0, 0, fingerprint(liar_keys.public))
            claims.append((me, Message("hello", {**ABOUT, "public_key": liar_keys.public}, (), 1)))
        for sender, message in claims:
            liar.send(encode(sender, message, proof))
        until(lambda: service.dropped == len(claims) + 1 or role.ended is not None or len(role.roster.members) > 1)
        assert not liar.poll(0), "the liar receives no answer"
        liar.close(0)
        assert role.roster.member_at("worker", 0) is victim
        assert len(role.roster.members) == 1
        assert role.ended is None
        assert role.specification.number < 0
        assert not role.signal
        with Watcher(service.endpoint, keys) as watcher:
            assert watcher.ask(60.0) is not None, "an observer with the run's keys may look"
        until(lambda: list(service.routes) == [victim.peer])  # The observer's route is removed.
        membership.close()
        assert role.ended is not None, "the worker itself may leave"
        watch.coordinator = replace(watch.coordinator, coordinator=service.endpoint)
        watch.send("stop", {"members": [["worker", 0], ["server", 0]]})
        thread.join(60)
        assert not thread.is_alive(), "the supervision itself may stop it"


def test_nobody_takes_the_place_of_a_living_member() -> None:
    """Send a hello of a later incarnation, which any process with the run's key could send."""
    run = Run(1)
    worker = run.member("worker", 0)
    later, hello = worker._replace(incarnation=1), Message("hello", ABOUT | {"public_key": ""}, request=1)
    run.coordinator.on_message(run.world.now, later, hello)
    assert run.members == [worker]
    run.report_death(worker, replaced=True)
    run.coordinator.on_message(run.world.now, later, hello)
    assert run.members == [later]


@pytest.mark.parametrize(
    ("role", "allowed"), [("server", {"get", "end"}), ("worker", {"put", "get", "end"}), (WATCHER, set())]
)
def test_a_process_can_only_send_the_requests_of_its_role(role: str, allowed: set[str]) -> None:
    """Check that servers do not publish, workers do not stop the coordinator, and observers do not change anything."""
    run = Run(1, 1)
    peer = Peer(WATCHER, 0) if role == WATCHER else run.member(role, 0)
    accepted = set()
    for number, kind in enumerate(("put", "get", "end", "stop", "died", "status"), 2):
        with contextlib.suppress(ControlError):
            run.coordinator.on_message(run.world.now, peer, Message(kind, CONTENTS, request=number))
            accepted.add(kind)
    assert accepted == allowed
