"""Programs of Python that start warm: forked from a process that has imported torch and Lightning.

A program that a test starts spends most of its seconds on these imports. Here it begins as a fork of the test's
process as that was before the test ran, and then does what the interpreter would: its own environment, working
directory, open files, signal handlers, arguments and ``__main__``. Programs that it starts in turn are warm, too.

The fork is made by a helper, which stays as clean as it was, and is handed over to whoever asked: `os.waitpid` and the
kernel's signal at a parent's death see it as a started program.
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

from roomy_stack import roomy

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
HELPER = "warm helper"  # What ps calls it, of at most 15 characters.
MOST_FILES = 250  # of one message
PIECE = 60000  # bytes; a message of the socket can be twice as long
# How the interpreter is told to be one of multiprocessing's processes that import what they need.
STARTS = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

popen = subprocess.Popen
_spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


class Helper:
    """A process that forks programs. It ends with the one that uses it."""

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
            program: ``words`` after the interpreter, ``cwd``, ``env``, whether it has a ``session`` of its own, and
                whether what it starts is ``warm``, too.
            files: The descriptors it begins with: those here by what they are there.

        Returns:
            Its process id: it is a child of this process.
        """
        text = json.dumps({**program, "files": list(files)}).encode()
        with self._lock:
            _adopt(True)  # The program's parent ends at once; it becomes a child of this process.
            socket.send_fds(self._socket, [str(len(text)).encode()], list(files.values()))
            for start in range(0, len(text), PIECE):
                self._socket.send(text[start : start + PIECE])
            pid = int(self._socket.recv(64))
            _adopt(False)
        return pid


helper: Helper | None = None
_inherited = True


def install(inherited: bool = True) -> None:
    """Start programs warm from now on; to be called in a process that has done nothing yet but import.

    Args:
        inherited: Whether programs that these start are warm, too.
    """
    global helper, _inherited
    helper = Helper()
    _inherited = inherited
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    multiprocessing.util.spawnv_passfds = _spawn_warm  # type: ignore[attr-defined]


def is_installed() -> bool:
    """Whether programs start warm here."""
    return helper is not None


class WarmPopen(popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, with a warm start for programs of this Python."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, env, _, _, shell, *pipes = rest[:11]
        words = [] if shell or isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
        if helper is None or not words or words[0] != sys.executable or executable or preexec_fn or pass_fds:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        stdin, _, _, stdout, _, stderr = pipes
        files = {number: number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))}
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
        signal.signal(signum, signal.SIG_IGN)  # Ctrl-C and its like reach the whole group.
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
                time.sleep(0.0002)  # Until it is the child of the one that has asked, which then learns its number.
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
    """Run a program in this process as the interpreter would, and end."""
    _call("python")
    if program["session"]:
        os.setsid()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    above = [fcntl.fcntl(file, fcntl.F_DUPFD, most // 2) for file in files]
    # Objects of the tests' process close the descriptors that they had when they are collected: by then, a file of the
    # program would have the number. So the numbers stay taken.
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in map(int, os.listdir("/proc/self/fd")):
        if 3 <= file < most // 2:
            with contextlib.suppress(OSError):  # That of the listing itself.
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
    """Put back what pytest changed in this interpreter, and what an import would have read from the environment."""
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
    tempfile.tempdir = None  # It remembers TMPDIR.


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
        # Of its own: Lightning starts the program again that `__main__` was made from.
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
