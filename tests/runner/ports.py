"""Free ports for tests that run at the same time and bind their port some time after they have asked for it."""

import itertools
import os
import socket

# These ports are below Linux's ephemeral ports (32768 to 60999): any process may get an ephemeral port in between.
FIRST, COUNT, EACH = 10_000, 22_000, 8
_asked = itertools.count()


def free_port() -> int:
    """Return a free TCP port that this function gives to no other process: each process has a range of its own."""
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
