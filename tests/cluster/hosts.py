"""Hosts that are network namespaces on this machine, each with its own name and address, joined by a switch."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes_of import dropped, wait_until

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Return the reason why this machine cannot have network namespaces, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian: apt-get install iproute2)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@dataclass
class Run:
    """A process on a host, forked from the test's process."""

    pid: int
    log: Path
    code: int | None = None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait(self, seconds: float = 100) -> int:
        """Wait for the end of the process and return its exit code."""
        wait_until(lambda: self.poll() is not None, self.output, seconds)
        assert self.code is not None
        assert not dropped(self.output()), self.output()
        return self.code


@dataclass
class Host:
    """A host.

    Attributes:
        name: Host name.
        address: IP address on the switch.
        space: Name of the network namespace.
        names: Content of the host's ``/etc/hosts``.
    """

    name: str
    address: str
    space: str
    names: str = ""

    def set_link(self, state: str) -> None:
        """Disconnect the host from the switch (``down``), or connect it again (``up``)."""
        _ip("-n", self.space, "link", "set", "wire", state)

    def kill_all(self) -> None:
        """Kill all processes on the host."""
        listed = subprocess.run(["ip", "netns", "pids", self.space], capture_output=True, text=True).stdout
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Network:
    """A switch and its hosts.

    Each host also has an interface ``extra``, which comes first in the list of interfaces and leads nowhere.

    Args:
        folder: Folder for the output of the hosts' processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.switch = f"cnn{os.getpid()}"
        self.hosts: list[Host] = []
        self._started = 0
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "bridge", "up")

    def add(self, name: str) -> Host:
        number = len(self.hosts)
        host = Host(name, f"10.77.9.{number + 1}", f"{self.switch}h{number}")
        port = f"port{number}"
        _ip("netns", "add", host.space)
        _ip("-n", host.space, "link", "add", "extra", "type", "veth", "peer", "name", "nowhere")
        _ip("-n", host.space, "addr", "add", f"10.99.{number}.1/24", "dev", "extra")
        _ip("link", "add", "wire", "netns", host.space, "type", "veth", "peer", "name", port, "netns", self.switch)
        _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "wire")
        for link in ("lo", "extra", "nowhere", "wire"):
            _ip("-n", host.space, "link", "set", link, "up")
        self.hosts.append(host)
        return host

    def remove(self) -> None:
        # The test may have added hosts in a forked process, so `self.hosts` may be incomplete.
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for space in (line.split()[0] for line in listed.splitlines() if line.startswith(self.switch)):
            Host("", "", space).kill_all()
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def start(self, host: Host, function: Callable[[], None]) -> Run:
        """Run a function on a host, in a process forked from this one."""
        log = self.folder / f"{host.name}-{self._started}.log"
        self._started += 1
        log.touch()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                names = log.with_suffix(".hosts")
                names.write_text(host.names)
                _enter(host, names)
                file = os.open(log, os.O_WRONLY)
                os.dup2(file, 1)
                os.dup2(file, 2)
                sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
                function()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        return Run(pid, log)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Yield a network without hosts; at the end of the block the network and its processes are removed."""
    with tempfile.TemporaryDirectory() as folder:
        made = Network(Path(folder))
        try:
            yield made
        finally:
            made.remove()


@contextlib.contextmanager
def two_hosts() -> Iterator[Network]:
    """Yield a network with the hosts ``alpha`` and ``beta``."""
    with network() as made:
        alpha, beta = made.add("alpha"), made.add("beta")
        for host, other in ((alpha, beta), (beta, alpha)):
            # As on Debian, a host's own name is a loopback address.
            host.names = f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
        yield made


def bind(source: Path, target: Path, read_only: bool = False) -> None:
    """Mount a file or directory at another path, visible to this process only."""
    subprocess.run(["mount", "--bind", source, target], check=True)
    if read_only:
        subprocess.run(["mount", "-o", "remount,ro,bind", target], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _enter(host: Host, names: Path) -> None:
    """Enter a host like ``ip netns exec``, but also with the host's name, ``/etc/hosts`` and ``/run``.

    The process needs its own ``/run``, because another test may remove the mount points in the machine's ``/run``.
    """
    file = os.open(f"/run/netns/{host.space}", os.O_RDONLY)
    _check(_libc.setns(file, CLONE_NEWNET))
    os.close(file)
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    socket.sethostname(host.name)
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(_libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None))
    bind(names, Path("/etc/hosts"))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
