"""Run a function in a process that is forked from pytest's process, and check that no process is left behind."""

import contextlib
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from tests.runner import warm
from tests.runner.roomy_stack import roomy

T = TypeVar("T")


def in_fork(function: Callable[[], T]) -> T:
    """Return the result of a function that trains, for fixtures.

    Fixtures run in pytest's own process, which must not train, so the function runs in a forked process.
    """
    with tempfile.NamedTemporaryFile() as file:
        code, output = run_forked(lambda: torch.save(function(), file.name))
        assert code == 0, output
        result: T = torch.load(file.name, weights_only=False)
    return result


def run_forked(
    function: Callable[[], None], timeout: float = 200, keep_streams: bool = False, start_warm: bool = False
) -> tuple[int, str]:
    """Run a function in a forked process and return its exit code and output; fail if it leaves a process behind.

    Args:
        function: Function that the process runs.
        timeout: Seconds after which the process and its group are killed, and the test fails.
        keep_streams: Keep pytest's `sys.stdout`, for tests that use `capsys`.
        start_warm: Start the function's own programs warm; see `runner/warm.py`.
    """
    with tempfile.TemporaryFile("w+b") as log:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            # Here one thread does it. Otherwise backward's threads may do it at the same time; see NetworkModule.setup.
            torch.set_num_threads(1)
            # Likewise: the first use of autograd after a fork replaces its engine.
            torch.ones(1, requires_grad=True).exp()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if start_warm or warm.is_installed():
                warm.install()
            streams = [os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)]
            if not keep_streams:
                sys.stdout, sys.stderr = streams
                for name in ("lightning.fabric", "lightning.pytorch"):
                    for handler in logging.getLogger(name).handlers:
                        if isinstance(handler, logging.StreamHandler):
                            handler.setStream(sys.stderr)  # Until now it is pytest's stream of the time of the import.
            code = 1
            try:
                assert not torch._C._cuda_isInBadFork(), "a test marked `light` has asked for CUDA before this one"
                roomy(function)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                traceback.print_exc(file=streams[1])
            sys.stdout.flush()
            os._exit(code)
        process = os.pidfd_open(pid)
        in_time, _, _ = select.select([process], [], [], timeout)
        os.close(process)
        if not in_time:
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        left = kill_group(pid)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert in_time, f"no end after {timeout} s:\n{output}"
    assert not left, f"processes were left behind:\n{left}\n{output}"
    return os.waitstatus_to_exitcode(status), output


def kill_group(group: int, seconds: float = 30.0) -> str:
    """Wait for a process group to end; after `seconds`, kill the processes that are left and return a list of them."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while left := alive(group):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            return "\n".join(left)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return ""


def alive(group: int) -> list[str]:
    """Return the processes of a group, without zombies: processes that have ended but were not waited for."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = status.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state not in "ZX":
                members.append(f"{name}) {state}")
    return members


@contextlib.contextmanager
def leaves_no_sockets() -> Iterator[None]:
    """Use a temporary folder of its own for the code inside, and check that no sockets are left in the folder.

    The folder is separate because other tests run at the same time.
    """
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        assert not list(Path(folder).glob("cnnstrategies*")), "a directory of sockets was left behind"
        tempfile.tempdir = None
