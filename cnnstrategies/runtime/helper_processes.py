"""Helper processes of a rank, such as loader workers. They ignore the signals that stop a run, and end with their rank.

A terminal sends Ctrl-C to the whole process group, and many schedulers send SIGTERM or a warning to all processes of a
job. The rank then finishes its step, and still needs its loader workers. A rank itself ends a worker with SIGTERM, so
only a SIGTERM from the rank ends a worker.

In C, torch's loader workers install a handler of SIGTERM after this module has acted, and this handler would end the
worker. A helper process therefore blocks SIGTERM. A thread waits for the blocked signal and reads who has sent it.
"""

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from types import FrameType
from typing import Any

from cnnstrategies.runtime.stop_signals import BLOCKED, leave_to_helpers

PARENT_SECONDS = 1.0  # After an ignored SIGTERM: seconds between two checks whether the parent process has ended.
_rank: int | None = None  # Process id of the rank whose helper processes ignore signals.
_is_registered = False


def shield_helpers(on: bool = True) -> None:
    """Determine whether helper processes that this rank starts from now on ignore signals that stop a run.

    Helper processes are processes that Python's module ``multiprocessing`` starts. If it does not fork them, they
    ignore signals only if they are started with :func:`blocked_start` and :func:`task_of`.
    """
    global _rank, _is_registered
    _rank = os.getpid() if on else None
    leave_to_helpers(on)
    if not _is_registered:
        register: Any = util
        register.register_after_fork(shield, _shield_fork)
        _is_registered = True


@contextlib.contextmanager
def unshielded_start() -> Iterator[None]:
    """Return a context in which this rank starts processes that are not its helpers, such as a coordinator or a server.

    Such a process decides itself what a signal does. In a helper, the thread that waits for SIGTERM would take a
    SIGTERM that arrives before the process is ready for it.
    """
    shields = _rank == os.getpid()
    if shields:
        shield_helpers(False)
    try:
        yield
    finally:
        if shields:
            shield_helpers()


def end_helpers() -> None:
    """End this process's helper processes, because the run stops and needs them no more.

    Otherwise torch waits up to five seconds for loader workers when the interpreter exits.
    """
    for process in multiprocessing.active_children():
        if process.daemon:
            process.terminate()


def _shield_fork(_: object) -> None:
    # Only `multiprocessing` calls this function. A process that is forked in another way may run another program, and
    # the program would inherit the blocked signal.
    if _rank is not None and _rank == os.getppid():
        shield(_rank)


def shield(rank: int) -> None:
    """Make this process ignore signals that stop a run, and end when its rank sends SIGTERM or has ended.

    Args:
        rank: Process id of the rank.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    others = set(BLOCKED) - {signal.SIGTERM}
    for signum in others:
        # Programs that this process starts would inherit SIG_IGN, but do not inherit a handler.
        signal.signal(signum, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, others)
    initialize: Any = subprocess.Popen.__init__
    subprocess.Popen.__init__ = _unblocked(initialize)  # type: ignore[method-assign]
    threading.Thread(target=_wait_for_end, args=(rank,), name="termination", daemon=True).start()


def _ignore(signum: int, frame: FrameType | None) -> None:
    pass


def _unblocked(initialize: Any) -> Any:
    """Return a constructor of ``subprocess.Popen`` whose programs do not inherit the blocked SIGTERM.

    The new process unblocks SIGTERM, and not this process: a SIGTERM that arrives now, or for which the thread has not
    been awake yet, would end this process.
    """
    parameters = inspect.signature(initialize)

    @functools.wraps(initialize)
    def start(*args: Any, **kwargs: Any) -> None:
        call = parameters.bind(*args, **kwargs)
        call.arguments["preexec_fn"] = functools.partial(_unblock, call.arguments.get("preexec_fn"))
        initialize(*call.args, **call.kwargs)

    return start


def _unblock(before_program: Callable[[], object] | None) -> None:
    """Let a new process get SIGTERM, before it calls the user's function and becomes another program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if before_program is not None:
        before_program()


def _wait_for_end(rank: int) -> None:
    parent = os.getppid()
    stops = False  # Whether a signal has been ignored. The rank then may be killed before it can end this process.
    while True:
        signals = {signal.SIGTERM}
        sent = signal.sigtimedwait(signals, PARENT_SECONDS) if stops else signal.sigwaitinfo(signals)
        if (sent is not None and sent.si_pid == rank) or os.getppid() != parent:
            os._exit(0)  # torch's loader workers also end with 0 if their rank ends them.
        stops = True


@contextlib.contextmanager
def blocked_start() -> Iterator[None]:
    """Return a context in which a process starts with blocked signals, until it unpickles :func:`task_of`.

    Otherwise Ctrl-C would print a traceback of the modules that the process is importing.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def task_of(process: Any) -> Any:
    """Return an object to pickle instead of a process object of ``multiprocessing``.

    When the started process unpickles the object, the result is the process object. From then on, a helper process of a
    rank ignores the signals that stop a run. On another process, such as a rank, they have their default effect.
    """
    return _Task(process, os.getpid() if _rank == os.getpid() else None)


class _Task:
    def __init__(self, process: Any, rank: int | None) -> None:
        self._process = process
        self._rank = rank
        self._name = process.name  # Python's fork server reads this attribute.

    def __reduce__(self) -> tuple[Any, ...]:
        return _accept_signals, (self._process, self._rank)


def _accept_signals(process: Any, rank: int | None) -> Any:
    if rank is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    else:
        shield(rank)
    return process
