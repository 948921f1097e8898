"""The processes of one run: how they end together."""

import atexit
import contextlib
import ctypes
import io
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

REFUSED = "CNNSTRATEGIES_REFUSED"  # Environment variable: a link that is there once a rank has failed.
STARTER = "CNNSTRATEGIES_STARTER"  # Environment variable: the process that starts the ranks of this machine.
PREFIX = "cnnstrategies_"  # Of that link.
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15


def end_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent dies; nothing happens outside Linux.

    Rank 0 ends the ranks that it started, unless it is killed itself; a rank that still waits for it to appear
    would go on waiting for the process group's time-out, 30 minutes.

    Args:
        parent: Its process id; None if it is not known. It may have ended while this one was still importing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


def end_group_at_exit() -> None:
    """Have torch's default process group end, if there is one then, before the interpreter does.

    Its threads would go on running while the interpreter is taken down. What they then free can abort a process that is
    done, ``terminate called without an active exception``: one run in many, where processors are scarce. Lightning ends
    the group for NCCL alone, and torch never does.
    """
    atexit.register(_end_group)


def leave_group_at_exit() -> None:
    """Undo :func:`end_group_at_exit`: after a failure its end would wait for what a lost rank does not send."""
    atexit.unregister(_end_group)


def _end_group() -> None:
    import torch.distributed as dist  # The command line uses this file before torch.

    if dist.is_initialized():
        dist.destroy_process_group()


def name_process(name: str) -> None:
    """Give this process the name that ps and top show, of at most 15 characters; nothing happens outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Whether a child of this process is stopped, by SIGSTOP for instance."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # It has ended.


def started_processes(launcher: Any) -> list[Any]:
    """Return the processes that a launcher has started, as programs or by multiprocessing; an empty list if none."""
    return getattr(launcher, "procs", None) or []


def killed_rank(launcher: Any, seconds: float = 0.5) -> str | None:
    """Which of the ranks that a launcher has started was killed, or as a program is stopped, in words; None if none.

    Args:
        launcher: Its ``procs`` are looked at, if it has some. Those that were forked or spawned torch ends by SIGTERM
            when one fails, and by SIGKILL what is left half a minute later.
        seconds: How long to wait: the others can lose their connection to it a moment before it has ended.
    """
    ranks = started_processes(launcher)
    for rank, process in enumerate(ranks):
        if isinstance(process, BaseProcess) and process.exitcode == -signal.SIGKILL:
            return ended_by(rank, process.exitcode)
    processes = [process for process in ranks if isinstance(process, subprocess.Popen)]
    deadline = time.monotonic() + seconds
    while True:
        for rank, process in enumerate(processes, start=1):
            if (code := process.poll()) is not None and code < 0:
                return ended_by(rank, code)
            if code is None and is_stopped(process.pid):
                return f"rank {rank} is stopped, as by SIGSTOP"
        if time.monotonic() > deadline or all(process.poll() is not None for process in processes):
            return None
        time.sleep(0.05)


def ended_by(rank: int, code: int) -> str:
    """How a signal has ended a rank, in words."""
    name = signal.Signals(-code).name
    return f"rank {rank} was ended by {name}{', as the system does when memory is short' * (code == -signal.SIGKILL)}"


def told_by_starter(name: str) -> str | None:
    """An environment variable in a rank that another one, or its supervisor, has started as a program; else None."""
    return os.environ.get(name) if "LOCAL_RANK" in os.environ else None


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Give the ranks that this process starts as programs a place where the first to fail makes itself known.

    And the number of this process, with which they end.
    """
    if told_by_starter(REFUSED):
        yield
        return
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{PREFIX}*_*"):  # Of runs that were killed.
        number = old.name.removeprefix(PREFIX).partition("_")[0]
        if old.is_symlink() and number.isdigit() and not Path(f"/proc/{number}").exists():
            with contextlib.suppress(OSError):
                old.unlink()
    os.environ[REFUSED] = str(place / f"{PREFIX}{os.getpid()}_{secrets.token_hex(8)}")
    os.environ[STARTER] = str(os.getpid())
    try:
        yield
    finally:
        forget_failure()
        del os.environ[REFUSED], os.environ[STARTER]


def forget_failure() -> None:
    """Remove what :func:`first_to_fail` has made, in the process that has started the ranks."""
    if os.environ.get(STARTER) == str(os.getpid()):
        Path(os.environ[REFUSED]).unlink(missing_ok=True)


def first_to_fail(code: int) -> bool:
    """Whether this rank is the first on its machine that cannot go on, so that it is the one to say why."""
    if (path := os.environ.get(REFUSED)) is None:
        return True
    try:
        os.symlink(f"{os.getpid()} {code}", path)  # Made with what it says at once.
    except FileExistsError:
        return os.readlink(path).split()[0] == str(os.getpid())
    return True


def failed_elsewhere(launcher: Any, seconds: float = 10.0) -> int:
    """Wait for the rank that was the first to fail to end by itself, having spoken.

    Lightning kills the one that has started the others as soon as it sees one of them end, which may be before it has
    spoken itself.
    """
    process, code = map(int, os.readlink(os.environ[REFUSED]).split())
    for started in started_processes(launcher):
        if isinstance(started, subprocess.Popen) and started.pid == process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(seconds)
            return code
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return code


def failed_before() -> bool:
    """Whether another rank of this machine was the first to fail: the rest then lose their connection to it."""
    path = os.environ.get(REFUSED, "")
    return os.path.islink(path) and os.readlink(path).split()[0] != str(os.getpid())


def cannot_be_sent(error: BaseException) -> bool:
    """Whether an error was raised while something was pickled for a process that is to be spawned."""
    return any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class _Sent(popen_spawn_posix.Popen):
    """A spawned process that is sent what it is to run by a thread."""

    _fds: list[int]

    def _launch(self, described: Any) -> None:
        data = io.BytesIO()
        tracker: Any = resource_tracker.getfd()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(described.name), data)
            reduction.dump(described, data)
        finally:
            context.set_spawning_popen(None)
        (self.sentinel, theirs), (reads, writes) = os.pipe(), os.pipe()
        start: Any = util
        self.finalizer = util.Finalize(self, start.close_fds, (self.sentinel, writes))
        command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reads)
        self.pid = start.spawnv_passfds(spawn.get_executable(), command, [*self._fds, tracker, reads, theirs])
        os.close(theirs)
        os.close(reads)
        threading.Thread(target=_send, args=(writes, data.getbuffer()), daemon=True).start()


def _send(pipe: int, data: memoryview) -> None:
    with contextlib.suppress(OSError), open(pipe, "wb", buffering=0, closefd=False) as file:
        while data:
            data = data[file.write(data) :]


@contextlib.contextmanager
def spawned_by_a_thread() -> Iterator[None]:
    """Have nobody wait who spawns a process, so that whoever watches it sees it die or stop at once.

    multiprocessing waits until the process has read what it is to run, which it does after its imports; and for ever
    when it is killed or stopped before, for it holds the other end of their pipe itself.
    """
    kind: Any = context.SpawnProcess
    before = kind._Popen  # noqa: SLF001
    kind._Popen = staticmethod(_Sent)  # noqa: SLF001
    try:
        yield
    finally:
        kind._Popen = staticmethod(before)  # noqa: SLF001
