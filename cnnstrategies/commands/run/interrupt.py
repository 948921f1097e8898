"""Handling of Ctrl-C and SIGTERM while the main thread executes C++ code, during which Python cannot run handlers."""

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
    """End this process after a signal that its main thread does not notice within a time.

    While a rank waits for other ranks to start, its main thread executes torch's C++ code, and Python's handlers cannot
    run until the other ranks have finished their imports. If another handler has been installed, as in training, that
    handler has its own time limit.

    Args:
        end: Called before the process ends.
        seconds: Time for the main thread to notice the signal.
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
            if callable(handler):  # Other signals are ignored, or end the process immediately.
                signal.signal(signum, heed)
        # The interpreter writes a signal's number to this descriptor immediately, wherever the main thread is.
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
    """Stop writing signals to the socket before a fork: the child would write its signals to the parent's socket."""
    global _parents_descriptor
    if threading.current_thread() is threading.main_thread():
        _parents_descriptor = signal.set_wakeup_fd(-1)


def _attach_socket() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(_parents_descriptor, warn_on_full_buffer=False)


os.register_at_fork(before=_detach_socket, after_in_parent=_attach_socket, after_in_child=_detach_socket)
