"""Two hosts as network namespaces on this machine, each with its own name and address, joined by one cable."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # linux/sched.h
MS_REC, MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
SSHD = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
NO_SSHD = "sshd is not installed (Debian: apt-get install openssh-server)"
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian: apt-get install iproute2)"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@dataclass
class Run:
    """A process on one of the hosts, forked from the test's."""

    pid: int
    log: Path
    code: int | None = None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 100) -> int:
        """Its exit code."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
            assert self.code is not None or time.monotonic() < deadline, f"no end in {seconds} s:\n{self.output()}"
            time.sleep(0.05)
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class TwoHosts:
    """The hosts ``alpha`` and ``beta``.

    Their other interface, ``extra``, comes first in the list and leads nowhere.
    """

    names = ("alpha", "beta")
    addresses = ("10.77.9.1", "10.77.9.2")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spaces = [f"cnn{os.getpid()}{name[0]}" for name in self.names]
        self.runs: list[Run] = []

    def make(self) -> None:
        for number, space in enumerate(self.spaces):
            ip("netns", "add", space)
            hosts = Path("/etc/netns") / space / "hosts"
            hosts.parent.mkdir(parents=True)
            # As Debian does it: a host's own name is an address of the loopback.
            lines = ["127.0.0.1 localhost", f"127.0.1.1 {self.names[number]}"]
            lines.append(f"{self.addresses[1 - number]} {self.names[1 - number]}")
            hosts.write_text("\n".join(lines) + "\n")
        first, second = self.spaces
        ends = [f"cnn{os.getpid()}v0", f"cnn{os.getpid()}v1"]
        ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
        for number, space in enumerate(self.spaces):
            ip("-n", space, "link", "add", "extra", "type", "veth", "peer", "name", "nowhere")
            ip("-n", space, "addr", "add", f"10.99.{number}.1/24", "dev", "extra")
            ip("-n", space, "link", "set", ends[number], "name", "wire")
            ip("-n", space, "addr", "add", f"{self.addresses[number]}/24", "dev", "wire")
            for link in ("lo", "extra", "nowhere", "wire"):
                ip("-n", space, "link", "set", link, "up")

    def remove(self) -> None:
        for run in self.runs:
            run.kill()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.spaces[1], "link", "set", "wire", "down")

    def mend(self) -> None:
        """Plug it in again."""
        ip("-n", self.spaces[1], "link", "set", "wire", "up")

    def start(self, number: int, function: Callable[[], None]) -> Run:
        """Run a function on a host, in a process forked from this one."""
        log = self.folder / f"{self.names[number]}-{len(self.runs)}.log"
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                enter(self.spaces[number], self.names[number], Path(f"/etc/netns/{self.spaces[number]}/hosts"))
                file = os.open(log, os.O_WRONLY | os.O_CREAT)
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
        log.touch()
        self.runs.append(Run(pid, log))
        return self.runs[-1]


def enter(space: str, name: str, hosts: Path, own_run: bool = False) -> None:
    """What ``ip netns exec`` does, with a host name and a file of hosts of its own, and a ``/run`` if asked."""
    file = os.open(f"/run/netns/{space}", os.O_RDONLY)
    _check(_libc.setns(file, CLONE_NEWNET))
    os.close(file)
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    socket.sethostname(name)
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    if own_run:
        _check(_libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None))
    bind(hosts, Path("/etc/hosts"))


def bind(source: Path, target: Path, read_only: bool = False) -> None:
    """Show a file or directory at another place, to this process alone."""
    subprocess.run(["mount", "--bind", source, target], check=True)
    if read_only:
        subprocess.run(["mount", "-o", "remount,ro,bind", target], check=True)


def cut_for_a_moment_and_for_good(hosts: TwoHosts, *runs: Run) -> Path:
    """Pull the cable once for two seconds, and again when the runs have gone on since; their checkpoint."""
    path = _written(0, *runs)
    hosts.cut()
    time.sleep(2)  # Nothing can be on its way any more.
    hosts.mend()
    _written(path.stat().st_mtime_ns, *runs)
    hosts.cut()
    return path


def _written(since: int, *runs: Run) -> Path:
    """The checkpoint, as soon as it has been written again."""
    for _ in range(1000):
        for path in Path("runs").glob("*/*/checkpoints/last.ckpt"):
            if path.stat().st_mtime_ns > since:
                return path
        time.sleep(0.1)
    raise AssertionError("\n".join(run.output() for run in runs))


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    with tempfile.TemporaryDirectory() as folder:
        hosts = TwoHosts(Path(folder))
        try:
            hosts.make()
            yield hosts
        finally:
            hosts.remove()


def start_sshd(hosts: TwoHosts, folder: Path) -> str:
    """Starts a real SSH server on both hosts; the ssh command that gets in without a password."""
    for name in ("server", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [
        *("-p", "2222", "-h", folder / "server", "-o", f"AuthorizedKeysFile={folder / 'client.pub'}"),
        *("-o", "StrictModes=no", "-o", "UsePAM=no", "-o", "PermitRootLogin=yes", "-o", "PidFile=none"),
    ]
    for number in (0, 1):
        server = hosts.start(number, lambda: os.execv(str(SSHD), [str(SSHD), "-D", "-e", *map(str, options)]))
        while "Server listening" not in server.output():
            time.sleep(0.05)
    quiet = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return f"ssh -p 2222 -i {folder / 'client'} {quiet}"


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
