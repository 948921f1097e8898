"""The processes of one run, and how they end together."""

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

REFUSED = "CNNSTRATEGIES_REFUSED"  # Environment variable: path of a link that exists once a rank has failed.
STARTER = "CNNSTRATEGIES_STARTER"  # Environment variable: id of the process that starts the ranks of this machine.
PREFIX = "cnnstrategies_"  # first part of the link's name
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15


def end_with_parent(parent: int | None) -> None:
    """Make the kernel kill this process when its parent dies; nothing happens outside Linux.

    Rank 0 ends the ranks that it has started, unless rank 0 itself is killed. A rank that still waits for rank 0 to
    appear would then wait for the process group's time-out of 30 minutes.

    Args:
        parent: The parent's process id; None if it is not known. A parent that ended while this process was importing
            is noticed by its id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


def end_group_at_exit() -> None:
    """Make torch's default process group end before the interpreter ends, if there is a group then.

    Otherwise the group's threads would run while the interpreter is finalized. Memory that they free at that time can
    abort a process whose work is done, with ``terminate called without an active exception``; this happens in one run
    in many on busy processors. Lightning ends only groups of NCCL, and torch ends none.
    """
    atexit.register(_end_group)


def leave_group_at_exit() -> None:
    """Undo :func:`end_group_at_exit`: after a failure the group's end would wait for messages of a lost rank."""
    atexit.unregister(_end_group)


def _end_group() -> None:
    import torch.distributed as dist  # The command line imports this module before torch.

    if dist.is_initialized():
        dist.destroy_process_group()


def name_process(name: str) -> None:
    """Set the name that ps and top show for this process: at most 15 characters. Nothing happens outside Linux."""
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
    """Return words for a rank that was killed, or that is a stopped program; None if there is no such rank.

    Args:
        launcher: Lightning's launcher, with the ranks that it has started. If one forked or spawned rank fails, torch
            ends the other ranks by SIGTERM, and half a minute later by SIGKILL.
        seconds: How long to wait: other ranks can lose their connection to a rank a moment before that rank has ended.
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
    """Return words for the end of a rank by a signal, such as "rank 1 was ended by SIGTERM".

    Args:
        rank: The rank.
        code: Its exit code: the signal's number, negated.
    """
    name = signal.Signals(-code).name
    return f"rank {rank} was ended by {name}{', as the system does when memory is short' * (code == -signal.SIGKILL)}"


def starter_variable(name: str) -> str | None:
    """Return an environment variable set by the process that has started this rank as a program.

    None in a process that was not started as a rank.
    """
    return os.environ.get(name) if "LOCAL_RANK" in os.environ else None


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Let the ranks that this process starts as programs agree on the first rank that fails.

    The ranks inherit the path of a link, which the first rank that fails creates, and the number of this process, with
    which they end.
    """
    if starter_variable(REFUSED):
        yield
        return
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{PREFIX}*_*"):  # Links that killed runs have left.
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
    """Remove the link that :func:`first_to_fail` has made, in the process that has started the ranks."""
    if os.environ.get(STARTER) == str(os.getpid()):
        Path(os.environ[REFUSED]).unlink(missing_ok=True)


def first_to_fail(code: int) -> bool:
    """Whether this rank is the first on its machine that fails, so that it reports the cause."""
    if (path := os.environ.get(REFUSED)) is None:
        return True
    try:
        os.symlink(f"{os.getpid()} {code}", path)  # A link appears together with its content, unlike a file.
    except FileExistsError:
        return os.readlink(path).split()[0] == str(os.getpid())
    return True


def failed_elsewhere(launcher: Any, seconds: float = 10.0) -> int:
    """Wait until the rank that failed first has reported its error and has ended by itself; return its exit code.

    Lightning kills the ranks as soon as one of them has ended, which can be before the first one has reported.

    Args:
        launcher: Lightning's launcher, with the ranks that it has started.
        seconds: Longest wait.
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
    """Whether another rank of this machine has failed first, so that this rank has only lost its connection."""
    path = os.environ.get(REFUSED, "")
    return os.path.islink(path) and os.readlink(path).split()[0] != str(os.getpid())


def cannot_be_sent(error: BaseException) -> bool:
    """Whether an error was raised while an object was pickled for a spawned process."""
    return any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class _ThreadedSpawn(popen_spawn_posix.Popen):
    """A spawned process that receives its pickled task from a thread."""

    _fds: list[int]

    def _launch(self, process: Any) -> None:
        data = io.BytesIO()
        tracker: Any = resource_tracker.getfd()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), data)
            reduction.dump(process, data)
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
    """Spawn processes without waiting for them, so that their parent sees at once if a process dies or stops.

    multiprocessing itself waits until the new process has read its task, which the process does after its imports. If
    the process is killed or stopped before, multiprocessing waits forever, because it holds the pipe's other end.
    """
    kind: Any = context.SpawnProcess
    before = kind._Popen  # noqa: SLF001
    kind._Popen = staticmethod(_ThreadedSpawn)  # noqa: SLF001
    try:
        yield
    finally:
        kind._Popen = staticmethod(before)  # noqa: SLF001
