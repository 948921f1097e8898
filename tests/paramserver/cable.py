"""A connection between processes that a test can change a byte on."""

import contextlib
import socket
import threading
from pathlib import Path

LONG = b"\x02\0\0\0\0\0"  # How a frame of more than 255 and less than 65,536 bytes begins.


class Cable:
    """Leads to a listening process, for any number of others.

    Args:
        path: The socket at which it is reached instead.
        listening: The endpoint of the process.

    Attributes:
        endpoint: Where it is reached instead.
    """

    def __init__(self, path: Path, listening: str) -> None:
        self.endpoint = f"ipc://{path}"
        self._there = listening.removeprefix("ipc://")
        self._change: tuple[bool, str] | None = None
        self._changed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._there)
            for source, target, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(source, target, back), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1000):
                target.sendall(self._after(data, back))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _after(self, data: bytes, back: bool) -> bytes:
        """What becomes of some bytes."""
        if self._change == (back, "contents"):
            place = len(data) - 1
        elif self._change == (back, "length") and data.startswith(LONG):
            place = len(LONG)  # 65,536 bytes more or less, that nobody sends.
        else:
            return data
        self._change = None
        self._changed.set()
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    def change(self, back: bool, what: str) -> None:
        """Change a byte of one of the next frames.

        Args:
            back: Whether it is one that comes from the listening process.
            what: ``contents`` or ``length``.
        """
        self._changed.clear()
        self._change = back, what

    def has_changed(self) -> bool:
        """Whether that has happened."""
        return self._changed.is_set()
