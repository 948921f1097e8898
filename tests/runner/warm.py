"""Warm starts of Python programs: a program is forked from a process that has imported torch and Lightning.

A program that a test starts normally spends most of its time on these imports. With a warm start it begins as a fork
of the state that the test's process had before the test. It then gets what the interpreter would give it: its own
environment, working directory, open files, signal handlers, arguments and ``__main__``. Programs that it starts are
warm as well.

A helper process makes the fork, so the fork contains nothing of the running test. The new process then becomes a child
of the process that asked for it, so `os.waitpid` and the kernel's signal at a parent's death work as for any program.
"""

import atexit
import contextlib
import ctypes
import fcntl
import json
import logging
import multiprocessing.util
import os
import random
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from tests.runner.roomy_stack import roomy

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
HELPER = "warm helper"  # The helper's name in `ps`, with at most 15 characters.
MOST_FILES = 250  # Largest number of file descriptors in one message.
PIECE = 60000  # Bytes of a part of a program's description. A message of the socket can be twice as long.
# Beginnings of the code with which multiprocessing starts an interpreter that imports everything again.
STARTS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

popen = subprocess.Popen
_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


class Helper:
    """A process that forks programs. It ends when the process ends that uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            _call(HELPER)
            with contextlib.suppress(ConnectionError):
                _serve(theirs)
            os._exit(0)
        theirs.close()

    def start(self, program: dict[str, Any], files: dict[int, int]) -> int:
        """Start a program.

        Args:
            program: ``words`` (command-line arguments after the interpreter), ``cwd``, ``env``, ``session`` (whether
                the program gets a session of its own) and ``warm`` (whether programs that it starts are warm).
            files: By the program's file descriptor: the file descriptor of this process.

        Returns:
            The program's process id. The program is a child of this process.
        """
        text = json.dumps({**program, "files": list(files)}).encode()
        with self._lock:
            _adopt(True)  # The program's parent ends at once, and the program becomes a child of this process.
            socket.send_fds(self._socket, [str(len(text)).encode()], list(files.values()))
            for start in range(0, len(text), PIECE):
                self._socket.send(text[start : start + PIECE])
            pid = int(self._socket.recv(64))
            _adopt(False)
        return pid


helper: Helper | None = None
_inherited = True


def install(inherited: bool = True) -> None:
    """Start programs warm from now on. Call this in a process that has only imported modules so far.

    Args:
        inherited: Whether the started programs also start their programs warm.
    """
    global helper, _inherited
    helper = Helper()
    _inherited = inherited
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawn_warm  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Return whether this process starts programs warm."""
    return helper is not None


class WarmPopen(popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` with a warm start for programs of this Python interpreter."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, env, _, _, shell, *pipes = rest[:11]
        words = [] if shell or isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
        if helper is None or not words or words[0] != sys.executable or executable or preexec_fn or pass_fds:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        files = {number: number if opened == -1 else opened for number, opened in enumerate((stdin, stdout, stderr))}
        self.pid = helper.start(_program(words[1:], cwd, env, session=bool(rest[16])), files)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _spawn_warm(path: Any, args: list[Any], passfds: Any) -> int:
    words = [os.fsdecode(word) for word in args]
    if helper is None or len(passfds) + 3 > MOST_FILES or not any(word.startswith(STARTS) for word in words):
        return int(_spawn(path, args, passfds))
    return helper.start(_program(words[1:], None, None, session=False), {fd: fd for fd in (0, 1, 2, *passfds)})


def _program(words: list[str], cwd: Any, env: Any, session: bool) -> dict[str, Any]:
    where = {"cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
    return {"words": words, **where, "session": session, "warm": _inherited}


def _call(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _serve(connection: socket.socket) -> None:
    for signum in INTERRUPTIONS:
        signal.signal(signum, signal.SIG_IGN)  # Signals like that of Ctrl-C reach the whole group.
    while True:
        size, files, _, _ = socket.recv_fds(connection, 64, MOST_FILES)
        if not size:
            return
        text = b""
        while len(text) < int(size):
            text += connection.recv(PIECE)
        middle = os.fork()
        if middle == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid:
                os._exit(0)
            while os.getppid() == parent:
                # The requesting process learns this process's id only when this process has become its child.
                time.sleep(0.0002)
            try:
                connection.send(str(os.getpid()).encode())
                _become(json.loads(text), files)
            finally:
                traceback.print_exc()
                os._exit(1)
        os.waitpid(middle, 0)
        for file in files:
            os.close(file)


def _become(program: dict[str, Any], files: list[int]) -> None:
    """Run a program in this process as the interpreter would, then end the process."""
    _call("python")
    if program["session"]:
        os.setsid()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, most // 2) for file in files]
    # Objects of the tests' process close their descriptors when they are garbage-collected. By then a file of the
    # program could have the same number. So all these numbers stay in use.
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        if 3 <= file < most // 2:
            with contextlib.suppress(OSError):  # The descriptor of the listing itself is closed already.
                os.fstat(file)
                os.dup2(nothing, file, inheritable=False)
    for number, file in zip(program["files"], above, strict=True):
        os.dup2(file, number)
        os.close(file)
    for signum in (*INTERRUPTIONS, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    _forget_the_tests()
    if program["warm"]:
        install()
    code = 1
    try:
        roomy(lambda: _run(program["words"], program["env"].get("PYTHONPATH", "")))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code & 0xFF)


def _forget_the_tests() -> None:
    """Undo pytest's changes to this interpreter, and read again what imports have read from the environment."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    rank_zero_only.rank = _get_rank() or 0
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.getLogger().handlers.clear()
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
        for handler in logger.handlers:
            handler.stream = sys.stderr
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    random.seed()
    tempfile.tempdir = None  # Otherwise the module would remember the value of TMPDIR.


def _run(words: list[str], path: str) -> None:
    sys.path[:0] = [part for part in path.split(os.pathsep) if part]
    while words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[1:]  # An option of the interpreter.
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        # A new module, because Lightning starts the program again from which `__main__` was created.
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
