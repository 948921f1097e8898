"""Deaths of servers over real sockets: nothing is lost if backups have copies; otherwise the error names the loss.

Traces and simulated runs show that any message may be a process's last, and that the remaining processes go on.
"""

import contextlib
import dataclasses
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cnnstrategies.paramserver.core.view import ServersUnreachableError
from tests.paramserver.roles import PlainRoles, Roles


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
        with pytest.raises(ServersUnreachableError, match=r"server 1 has heard nothing from server 0 for 3 s"):
            run.joined()


LONG = b"\x02\0\0\0\0\0"  # Beginning of each frame of more than 255 and less than 65,536 bytes.


class Cable:
    """A proxy to a listening process that may change one byte of the data that it carries.

    Attributes:
        endpoint: Endpoint of the proxy.
        change: The frame to change next: whether it comes from the listening process, and whether its "contents" or its
            "length" changes. None if no change is left.
    """

    def __init__(self, path: Path, listening: str) -> None:
        self.endpoint = f"ipc://{path}"
        self.change: tuple[bool, str] | None = None
        self._there = listening.removeprefix("ipc://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._there)
            for source, target, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(source, target, back), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                target.sendall(self._after(data, back))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _after(self, data: bytes, back: bool) -> bytes:
        """Return data as the proxy passes it on."""
        if self.change == (back, "contents"):
            place = len(data) - 1
        elif self.change == (back, "length") and data.startswith(LONG):
            place = len(LONG)  # Changes the frame's length by 65,536 bytes.
        else:
            return data
        self.change = None
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def lay_cables(run: Roles) -> list[Cable]:
    """Let all processes reach the servers over cables."""
    cables = [Cable(run.directory / f"cable-{info.id}", info.endpoint) for info in run.view.servers]
    behind = zip(run.view.servers, cables, strict=True)
    run.publish(servers=tuple(dataclasses.replace(info, endpoint=cable.endpoint) for info, cable in behind))
    return cables


@pytest.mark.parametrize(("back", "changed"), [(True, "contents"), (False, "length")], ids=["from a server", "to one"])
def test_a_changed_byte_costs_only_a_connection(back: bool, changed: str, tmp_path: Path) -> None:
    """Train with two servers that back each other up, and change one byte on the cable of each."""
    options: dict[str, Any] = {"servers": 2, "replication": 2, "clip_norm": 0.3, "timeout": 6.0}
    with PlainRoles(tmp_path, (400, 300), encrypted=True, **options) as run:
        cables = lay_cables(run)
        worker, values = run.joined()
        for step in range(6):
            if step == 3:
                for cable in cables:
                    cable.change = back, changed
            run.step(worker)
            for parameter in run.parameters:
                parameter.grad = torch.ones_like(parameter)
            nn.utils.clip_grad_norm_(run.parameters, 0.3)
            run.optimizer.step()
    assert not any(cable.change for cable in cables)
    for value, parameter in zip(values, run.parameters, strict=True):
        torch.testing.assert_close(value, parameter.detach())


@pytest.mark.light
def test_the_optimizer_state_is_complete_if_a_server_dies_during_the_request(tmp_path: Path) -> None:
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
        threading.Timer(0.1, run.replace_server, args=(0,)).start()
        with pytest.raises(ServersUnreachableError, match="server 0 was started again, but its slices"):
            worker.refresh()
