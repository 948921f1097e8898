"""Ctrl-C and SIGTERM while the main thread is where Python's signal handlers do not run."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_parents = -1


@contextlib.contextmanager
def heeds_signals(end: Callable[[], None], seconds: float = 2.0) -> Iterator[None]:
    """End this process on a signal that its main thread does not notice within so many seconds, after calling ``end``.

    While a rank waits for the others to start, it is in torch's own code, and handlers do not run for as long as their
    imports take. Where another handler has taken over, as in training, it has its own grace.
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
            if callable(handler):  # Else it is ignored, or ends the process at once.
                signal.signal(signum, heed)
        # The interpreter writes a signal's number there at once, wherever the main thread is.
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


def _let_go() -> None:
    """A forked process has its parent's socket, and its signals are its own, from the first on."""
    global _parents
    if threading.current_thread() is threading.main_thread():
        _parents = signal.set_wakeup_fd(-1)


def _take_again() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(_parents, warn_on_full_buffer=False)


os.register_at_fork(before=_let_go, after_in_parent=_take_again, after_in_child=_let_go)
