"""Start and end of a run's processes, and detection of the rank that failed first."""

import atexit
import contextlib
import ctypes
import io
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cnnstrategies.runtime.helper_processes import blocked_start, task_of
from cnnstrategies.runtime.memory_records import REFUSED, killed_sibling, last_record, remove_records
from cnnstrategies.runtime.process_ids import ENDED, is_ending, state_and_start
from cnnstrategies.runtime.stop_signals import cleaned_up

STARTER = "CNNSTRATEGIES_STARTER"  # Environment variable: id of the process that started the ranks of this machine.
# Environment variable: id of the supervision process that has started this rank.
ENDS_WITH = "CNNSTRATEGIES_ENDS_WITH"
PREFIX = "cnnstrategies_"  # Prefix of the symbolic link's name.
PR_SET_PDEATHSIG = 1  # This constant and the next are from linux/prctl.h.
PR_SET_NAME = 15
# Longest time in seconds to wait until a rank has ended that the kernel is ending. To free its memory can take seconds.
ENDING = 30.0
# Seconds for which the record of a killed rank stays, so that other ranks of the rank's run can read it.
LEFT = 600.0


def end_with_parent(parent: int | None) -> None:
    """Make the kernel kill this process when its parent process ends. On systems other than Linux this has no effect.

    Rank 0 normally ends the ranks that it has started, but a killed rank 0 cannot do this. Ranks that are waiting to
    connect to rank 0 would then wait for the process group's time-out of 30 minutes.

    Args:
        parent: Process id of the parent, or None if it is not known. If the parent has ended before this call, this
            process has a different parent now and is killed immediately.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervision() -> None:
    """Make the kernel kill this process when its supervision process ends, if this process is a supervised rank.

    The environment variable is removed, because programs that this rank starts have a different parent process.
    """
    if (parent := os.environ.pop(ENDS_WITH, None)) is not None:
        end_with_parent(int(parent))


def end_group_at_exit() -> None:
    """Register a function that destroys torch's default process group, if it exists, when the interpreter exits.

    Without this function, the threads of the group still run during the finalization of the interpreter. If a thread
    frees memory during the finalization, the process can abort with ``terminate called without an active exception``
    although its work is done. Such aborts are rare, and mostly occur on busy CPUs. Lightning destroys only NCCL groups,
    and torch destroys no groups.
    """
    atexit.register(_end_group)


def leave_group_at_exit() -> None:
    """Undo :func:`end_group_at_exit`. After a failure, destroying the group would wait for a rank that was lost."""
    atexit.unregister(_end_group)


def _end_group() -> None:
    # The command line imports this module when it starts. torch is imported only here, because this takes seconds.
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def name_process(name: str) -> None:
    """Set the name under which ps and top show this process.

    The name is cut to 15 bytes. On systems other than Linux nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def is_stopped(pid: int) -> bool:
    """Whether a child of this process is stopped, for example by SIGSTOP."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # The child has ended.


def started_processes(launcher: Any) -> list[Any]:
    """Return the processes that one of Lightning's launchers has started: subprocesses, or multiprocessing's processes.

    The list is empty if the launcher has not started any process.
    """
    return getattr(launcher, "procs", None) or []


def killed_rank(launcher: Any) -> str | None:
    """Return a text about a rank that was ended by a signal or is stopped. Return None if no such rank is found.

    For forked and spawned ranks only SIGKILL counts, because torch itself sends SIGTERM to the other ranks when a rank
    fails.

    Args:
        launcher: Lightning's launcher, which has started the ranks.
    """
    ranks = started_processes(launcher)
    for rank, process in enumerate(ranks):
        if isinstance(process, BaseProcess):
            if is_ending(process.pid or 0):
                process.join(ENDING)
            if process.exitcode == -signal.SIGKILL:
                return ended_by(rank, process.exitcode, process.pid)
    processes = [process for process in ranks if isinstance(process, subprocess.Popen)]
    for rank, process in enumerate(processes, start=1):
        if process.poll() is None and is_ending(process.pid):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
        if (code := process.poll()) is not None and code < 0:
            return ended_by(rank, code, process.pid)
        if code is None and is_stopped(process.pid):
            return f"rank {rank} is stopped, for example by SIGSTOP"
    return None


def ended_by(rank: int, code: int, process: int | None) -> str:
    """Return a text about a rank that was ended by a signal, such as "rank 1 was ended by SIGTERM".

    Args:
        rank: The rank.
        code: Exit code of the rank's process, which is the negative number of the signal.
        process: Id of the rank's process; None if it is not known.
    """
    text = f"rank {rank} was ended by {signal.Signals(-code).name}"
    if code != -signal.SIGKILL:
        return text
    record = "" if process is None else last_record(process)
    return "; ".join((f"{text}, which the system sends when memory runs out", *([record] if record else [])))


def killed_beside(launch: str) -> str | None:
    """Return a text about a killed rank that a launcher such as torchrun has started together with this rank.

    Return None if no such rank is found, or if another rank has called this function before.

    Args:
        launch: See :class:`.MemoryRecord`.
    """
    if (sibling := killed_sibling(launch)) is None:
        return None
    rank, record = sibling
    return f"rank {rank} was killed, as the system does when memory runs out; {record}"


def starter_variable(name: str) -> str | None:
    """Return the value of an environment variable that a rank has inherited from the process that started the rank.

    The result is None in a process that was not started as a rank.
    """
    return os.environ.get(name) if "LOCAL_RANK" in os.environ else None


@contextlib.contextmanager
def one_refusal() -> Iterator[None]:
    """Set environment variables by which the ranks of this machine find out which rank failed first.

    One variable is the path of a symbolic link that the first failing rank creates (see :func:`first_to_fail`). The
    other variable is the id of this process, which starts the ranks.
    """
    if starter_variable(REFUSED):
        yield
        return
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{PREFIX}*_*"):  # Delete links and records that killed runs have left.
        number = old.name.removeprefix(PREFIX).partition("_")[0]
        if (old.is_symlink() or old.is_file()) and number.isdigit() and not Path(f"/proc/{number}").exists():
            with contextlib.suppress(OSError):
                if time.time() - old.lstat().st_mtime > LEFT:
                    old.unlink()
    os.environ[REFUSED] = str(place / f"{PREFIX}{os.getpid()}_{secrets.token_hex(8)}")
    os.environ[STARTER] = str(os.getpid())
    try:
        yield
    finally:
        forget_failure()
        remove_records()
        del os.environ[REFUSED], os.environ[STARTER]


def forget_failure() -> None:
    """Remove the symbolic link that :func:`first_to_fail` has created.

    The function has an effect only in the process that starts the ranks.
    """
    if os.environ.get(STARTER) == str(os.getpid()):
        Path(os.environ[REFUSED]).unlink(missing_ok=True)


def first_to_fail(code: int) -> bool:
    """Record that this rank fails, and return whether it is the first failing rank of this machine.

    The first failing rank reports the cause of the failure.

    Args:
        code: Exit code with which the rank will end.
    """
    if (path := os.environ.get(REFUSED)) is None:
        return True
    try:
        os.symlink(f"{os.getpid()} {code}", path)  # Unlike a file, a symbolic link is created with its content at once.
    except FileExistsError:
        return os.readlink(path).split()[0] == str(os.getpid())
    return True


def wait_for_end(process: int, launcher: Any, seconds: float = 10.0) -> None:
    """Wait until a rank of this machine has ended.

    Args:
        process: Id of the rank's process.
        launcher: Lightning's launcher, which may have started the rank.
        seconds: Longest time to wait.
    """
    for started in started_processes(launcher):
        if isinstance(started, subprocess.Popen) and started.pid == process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(seconds)
            return
    deadline = time.monotonic() + seconds
    while _is_running(process) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    """Whether a process of this machine has not ended. A zombie has ended, even if its parent has not waited for it."""
    fields = state_and_start(process)
    return fields is not None and fields[0] not in ENDED


def failed_elsewhere(launcher: Any) -> int:
    """Wait until the rank that failed first has reported its error and ended, and return the exit code of this rank.

    Without waiting, Lightning would kill all ranks as soon as any rank has ended, possibly before the rank that failed
    first has reported its error.

    Args:
        launcher: Lightning's launcher, which has started the ranks.
    """
    process, code = map(int, os.readlink(os.environ[REFUSED]).split())
    wait_for_end(process, launcher)
    return code


def failed_before() -> bool:
    """Whether another rank of this machine failed before this rank. This rank then need not report its own error."""
    path = os.environ.get(REFUSED, "")
    return os.path.islink(path) and os.readlink(path).split()[0] != str(os.getpid())


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Create a temporary folder inside this context, which is also removed if a signal ends this process.

    Args:
        prefix: Beginning of the folder's name.
    """
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    with folder, cleaned_up(partial(shutil.rmtree, folder.name, ignore_errors=True)):
        yield folder.name


def cannot_be_sent(error: BaseException) -> bool:
    """Whether an error was raised while multiprocessing pickled an object for a spawned process."""
    return any(frame.f_code is reduction.dump.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


class _ThreadedSpawn(popen_spawn_posix.Popen):
    """Spawned process that gets its pickled task from a thread of the parent process."""

    _fds: list[int]

    def _launch(self, process: Any) -> None:
        data = io.BytesIO()
        tracker: Any = resource_tracker.getfd()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), data)
            reduction.dump(task_of(process), data)
        finally:
            context.set_spawning_popen(None)
        (self.sentinel, theirs), (reads, writes) = os.pipe(), os.pipe()
        start: Any = util
        self.finalizer = util.Finalize(self, start.close_fds, (self.sentinel, writes))
        command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=reads)
        with blocked_start():
            self.pid = start.spawnv_passfds(spawn.get_executable(), command, [*self._fds, tracker, reads, theirs])
        os.close(theirs)
        os.close(reads)
        threading.Thread(target=_send, args=(writes, data.getbuffer()), daemon=True).start()


class _FromForkServer(popen_forkserver.Popen):
    """Process of Python's fork server that handles signals as :func:`.task_of` describes."""

    def _launch(self, process: Any) -> None:
        tracker: Any = resource_tracker
        tracker.ensure_running()  # The fork server would start this process, and accept signals after the start.
        with blocked_start():
            forkserver.ensure_running()
        launch: Any = super()._launch  # type: ignore[misc]
        launch(task_of(process))


def _send(pipe: int, data: memoryview) -> None:
    with contextlib.suppress(OSError), open(pipe, "wb", buffering=0, closefd=False) as file:
        while data:
            data = data[file.write(data) :]


@contextlib.contextmanager
def spawned_by_a_thread() -> Iterator[None]:
    """Make multiprocessing spawn processes without waiting until they have read their pickled tasks.

    Normally the parent process writes the task into a pipe, and waits until the new process has read it, which happens
    after the new process's imports. If the new process is killed or stopped before that, the parent waits forever: the
    write does not fail, because the parent itself holds the read end of the pipe open.

    Inside this context, processes that are spawned or started by a fork server handle signals as :func:`.task_of`
    describes.
    """
    replacements = {context.SpawnProcess: _ThreadedSpawn, context.ForkServerProcess: _FromForkServer}
    kinds: list[Any] = list(replacements)
    before = {kind: kind._Popen for kind in kinds}  # noqa: SLF001
    for kind in kinds:
        kind._Popen = staticmethod(replacements[kind])  # noqa: SLF001
    try:
        yield
    finally:
        for kind, popen in before.items():
            kind._Popen = staticmethod(popen)  # noqa: SLF001
