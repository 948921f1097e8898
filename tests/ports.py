"""Ports that no two tests take, though they run beside one another and use theirs some time after they have asked."""

import itertools
import os
import socket

# Below those that Linux gives to whoever names none (32768 to 60999): any of these may be taken in between.
FIRST, COUNT, EACH = 10_000, 22_000, 8
_asked = itertools.count()


def free_port() -> int:
    """A TCP port that nothing has and no other process will be given here: each has numbers of its own."""
    for _ in range(COUNT):
        port = FIRST + (os.getpid() * EACH + next(_asked) % EACH) % COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
