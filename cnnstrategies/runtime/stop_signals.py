"""Signals that stop a run. They wake a thread, and no signal handler raises an exception.

Python calls signal handlers in the main thread, between two instructions. A handler that raises an exception has two
faults. The exception is lost if the interrupted code ignores exceptions, for example a function that
``os.register_at_fork`` has registered: a run that lost its SIGTERM has trained to its end. And while the main thread
runs C++ code, for example while a rank waits for the other ranks to start, no handler is called.

Here, the handler does nothing. When a signal arrives, the interpreter writes the signal's number to a pipe at once
(``signal.set_wakeup_fd``). A thread reads the number and acts, whatever the main thread is doing.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

Action = Callable[[int], None]  # Called in the thread with the signal's number.

STOPPING = (signal.SIGINT, signal.SIGTERM)
# Signals that are blocked while a process forks.
BLOCKED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
# Time in seconds within which the same signal counts as one. Some programs send a signal to a process and also to its
# process group, for example `timeout`.
TOGETHER = 1.0
PATIENCE = 5.0  # Longest time in seconds for the cleanups of a process that a signal ends.
# Bytes that are not numbers of signals: the thread ends; the thread reports that it has acted on all earlier signals.
END, SETTLE = b"\x00", b"\xff"
SHOW_CURSOR = b"\x1b[?25h"  # Progress displays hide the terminal's cursor.


# Environment variable with the id of a process that passes its signals on to the ranks that it has started.
PASSES_ON = "CNNSTRATEGIES_PASSES_ON"


class Repeated:
    """Test whether a signal is sent again, or whether one signal arrives several times.

    Args:
        expected: Number of times that the first signal may arrive again at any later time.

    Attributes:
        received: Number of the first signal; None if no signal has arrived.
    """

    def __init__(self, expected: int = 0) -> None:
        self.received: int | None = None
        self._expected = expected
        self._until = 0.0

    def note(self, signum: int) -> bool:
        """Note that a signal has arrived, and return whether the sender has sent a signal again."""
        now = time.monotonic()
        if self.received is None:
            self.received = signum
            self._until = now + TOGETHER
            return False
        if self._expected:
            self._expected -= 1
            return False
        return now > self._until


def expected_repeats() -> int:
    """Return how often a signal to the process group arrives a second time, because the parent process passes it on."""
    return int(os.environ.get(PASSES_ON) == str(os.getppid()))


class LimitsStop:
    """Base class of a callback that ends its rank in time after a signal, even if the rank has not stopped by itself.

    Attributes:
        grace: Longest time in seconds from the signal to the end of the rank.
    """

    grace: float


class _SignalThread:
    """The thread of this process that acts on signals.

    Attributes:
        actions: By signal number: the current action.
        helpers_ignore: Whether processes that this process forks are helpers, for example loader workers, and ignore
            signals. Otherwise a signal has its default effect on these processes.
    """

    def __init__(self) -> None:
        self.actions: dict[int, Action] = {}
        self.helpers_ignore = False
        self._pipe: tuple[int, int] | None = None  # The ends to read and to write.
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()
        self._forking = threading.local()  # Each thread that forks has its own signal mask.

    def start(self) -> None:
        """Start the thread if it does not run."""
        if self._pipe is None:
            self._pipe = reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._act, args=(reader,), name="stop signals", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._pipe is not None and self._thread is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._pipe[1], END)
            self._thread.join()
            self.forget()

    def settle(self) -> None:
        """Wait until the thread has acted on all signals that have arrived."""
        if self._pipe is not None:
            self._settled.clear()
            os.write(self._pipe[1], SETTLE)
            self._settled.wait()

    def forget(self) -> None:
        """Close the pipe, so that :meth:`start` creates another pipe and another thread."""
        for descriptor in self._pipe or ():
            os.close(descriptor)
        self._pipe = self._thread = None

    def _act(self, reader: int) -> None:
        while (received := os.read(reader, 1)) != END:
            if received == SETTLE:
                self._settled.set()
                continue
            action = self.actions.get(received[0])
            # If other code has replaced the handler, the signal is for that code.
            if action is not None and signal.getsignal(received[0]) is _handle:
                try:
                    action(received[0])
                except Exception:  # The thread must act on later signals, and `settle` waits for the thread.
                    sys.excepthook(*sys.exc_info())

    def before_fork(self) -> None:
        """Block signals in the thread that forks, until the child process has left the pipe.

        Otherwise the child process would write a signal of its own to the pipe, and the parent process would act.
        """
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)

    def after_fork_in_parent(self) -> None:
        """Accept signals again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def after_fork_in_child(self) -> None:
        """Leave the parent's pipe. The child process does not act on signals as its parent does."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            self.forget()
            for signum in () if self.helpers_ignore else self.actions:
                if signal.getsignal(signum) is _handle:
                    signal.signal(signum, signal.SIG_DFL)
            self.actions.clear()
            _cleanups.clear()
        self.helpers_ignore = False
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)


_thread = _SignalThread()
_cleanups: list[Callable[[], None]] = []
_interrupted = threading.Event()
_ending = threading.Event()
os.register_at_fork(
    before=_thread.before_fork,
    after_in_parent=_thread.after_fork_in_parent,
    after_in_child=_thread.after_fork_in_child,
)


def _handle(signum: int, frame: FrameType | None) -> None:
    """Do nothing, because the thread acts."""


@contextlib.contextmanager
def acting_on(signums: Iterable[int], action: Action) -> Iterator[None]:
    """Return a context in which a thread calls a function when one of some signals arrives.

    In a nested context, the inner function is called. Only the main thread may handle signals. In another thread the
    context has no effect.

    Args:
        signums: Numbers of the signals.
        action: Function that the thread calls with the signal's number.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: (_thread.actions.get(signum), signal.getsignal(signum)) for signum in signums}
    _thread.start()
    for signum in before:
        _thread.actions[signum] = action
        signal.signal(signum, _handle)
    try:
        yield
    finally:
        _thread.settle()
        for signum, (outer, handler) in before.items():
            if outer is None:
                _thread.actions.pop(signum, None)
            else:
                _thread.actions[signum] = outer
            if signal.getsignal(signum) is _handle:
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        if not _thread.actions:
            _thread.stop()


@contextlib.contextmanager
def passing_on(signums: Iterable[int], send: Callable[[int], bool]) -> Iterator[None]:
    """Return a context in which this process, which has started ranks, passes its signals on to the ranks.

    The process ends when its ranks have ended. Without ranks, SIGINT or SIGTERM ends the process at once. If SIGINT or
    SIGTERM is sent again, the process and the ranks end at once.

    Args:
        signums: Numbers of the signals.
        send: Function that sends a signal to the ranks, and returns whether there are ranks.
    """
    repeated = Repeated()

    def pass_on(signum: int) -> None:
        first = repeated.received is None
        if signum not in STOPPING:
            send(signum)
        elif repeated.note(signum) or (first and not send(signum)):
            end_process(signum)

    before = os.environ.get(PASSES_ON)
    os.environ[PASSES_ON] = str(os.getpid())
    try:
        with acting_on(signums, pass_on):
            yield
    finally:
        if before is None:
            del os.environ[PASSES_ON]
        else:
            os.environ[PASSES_ON] = before


def settle() -> None:
    """Wait until the actions of all signals that have arrived have returned. Only the main thread may call this."""
    _thread.settle()


def leave_to_helpers(ignore: bool) -> None:
    """Determine whether signals have no effect on processes that this process forks from now on.

    Otherwise the signals have their default effect on these processes, until they act on signals themselves.
    """
    _thread.helpers_ignore = ignore


def ends_on_signals() -> contextlib.AbstractContextManager[None]:
    """Return a context in which SIGINT and SIGTERM end this process, with the exit code 128 + the signal's number."""
    return acting_on(STOPPING, end_process)


def end_process(signum: int) -> NoReturn:
    """End this process and its child processes because of a signal. Any thread may call this function.

    The cleanups of :func:`cleaned_up` run first. The main thread continues in the meantime, so the cleanups cannot rely
    on the main thread.
    """
    _ending.set()
    code = 128 + signum
    timer = threading.Timer(PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
    processes = sys.modules.get("multiprocessing")
    for child in processes.active_children() if processes is not None else ():
        child.kill()
    for cleanup in reversed(_cleanups):
        with contextlib.suppress(Exception):
            cleanup()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
            if stream.isatty():
                os.write(stream.fileno(), SHOW_CURSOR)
    os._exit(code)


def wait_if_ending() -> None:
    """Wait forever if :func:`end_process` is ending this process, so that the main thread reports no consequence."""
    if _ending.is_set():
        threading.Event().wait()


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """Return a context in which :func:`end_process` calls a function before the process ends.

    Args:
        cleanup: Function that ends other processes or removes files. A thread calls it.
    """
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Return a context in which Ctrl-C makes :func:`raise_if_interrupted` raise KeyboardInterrupt.

    A second Ctrl-C ends the process.
    """
    repeated = Repeated()

    def interrupt(signum: int) -> None:
        _interrupted.set()
        if repeated.note(signum):
            end_process(signum)

    with acting_on([signal.SIGINT], interrupt):
        try:
            yield
        finally:
            _interrupted.clear()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has been pressed inside :func:`interruptible`.

    Code that waits calls this between two waits.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt
