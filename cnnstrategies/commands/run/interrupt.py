"""Handling of Ctrl-C and SIGTERM while the main thread runs C++ code.

Python runs signal handlers in the main thread, and only between instructions of Python code. While the main thread
waits in C++ code, no handler can run.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_parents_descriptor = -1


@contextlib.contextmanager
def heeds_signals(end: Callable[[], None], seconds: float = 2.0) -> Iterator[None]:
    """Make sure that a signal ends this process, even if the main thread runs C++ code inside this context.

    For example, a rank that waits for the other ranks to start runs torch's C++ code. If Python's signal handler has
    not run `seconds` after the signal, a second thread calls `end` and ends the process. During training another
    handler is installed. The second thread does nothing then.

    Args:
        end: Function that is called before the process ends.
        seconds: Time in seconds within which the main thread must run the signal handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noticed = threading.Event()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def heed(signum: int, frame: FrameType | None) -> None:
        noticed.set()
        handler = before[signal.Signals(signum)]
        if callable(handler):
            handler(signum, frame)

    def watch(reader: socket.socket) -> None:
        while received := reader.recv(1):
            signum = received[0]
            if signum in SIGNALS and signal.getsignal(signum) is heed and not noticed.wait(seconds):
                end()
                os._exit(128 + signum)

    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        for signum, handler in before.items():
            # If no Python function handles a signal, the operating system handles the signal at once, even during C++
            # code. Nothing is changed for such a signal.
            if callable(handler):
                signal.signal(signum, heed)
        # When a signal arrives, the interpreter writes the signal's number to this socket at once, even if the main
        # thread cannot run a handler. The second thread reads the number.
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        watcher = threading.Thread(target=watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous)
            for signum, handler in before.items():
                if signal.getsignal(signum) is heed:
                    signal.signal(signum, handler)
            writer.shutdown(socket.SHUT_RDWR)
            watcher.join()


def _detach_socket() -> None:
    """Before a fork, make the interpreter stop writing the numbers of signals to the socket.

    Otherwise the child process would write its signals to the socket of the parent process. After the fork,
    `_attach_socket` makes the parent process write signals to the socket again.
    """
    global _parents_descriptor
    if threading.current_thread() is threading.main_thread():
        _parents_descriptor = signal.set_wakeup_fd(-1)


def _attach_socket() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(_parents_descriptor, warn_on_full_buffer=False)


os.register_at_fork(before=_detach_socket, after_in_parent=_attach_socket, after_in_child=_detach_socket)
