"""Two hosts with a long wire between them: network namespaces, and a process that carries their packets.

It hands over each packet when the wire has had the time for its bytes and all before it, and the delay of the way. That
is what `netem` does in kernels that have it. Needs root, iproute2 and /dev/net/tun.
"""

import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "pipeline"))

from hosts import PREFIX
from ranks import sh

MTU = 9000
QUEUE_SECONDS = 0.2  # what waits for the wire for longer is dropped
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of linux/if_tun.h
CLONE_NEWNET = 0x40000000


@contextmanager
def far_hosts(megabits: int, milliseconds: float) -> Iterator[list[str]]:
    """Names of two hosts, 10.77.0.1 and 10.77.0.2 on their eth0; they are removed at the end.

    Args:
        megabits: Mbit/s in each direction.
        milliseconds: From one to the other and back.
    """
    names = [f"{PREFIX}-{number}" for number in range(2)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that `timeout` leaves none behind.
    carrier = None
    try:
        for name in names:
            sh(f"ip netns add {name}")
        command = [sys.executable, __file__, *names, str(megabits), str(milliseconds / 2000)]
        carrier = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert carrier.stdout is not None
        if carrier.stdout.readline() != "ready\n":
            raise SystemExit("the wire could not be laid")
        for number, name in enumerate(names):
            sh(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 mtu {MTU} up && ip -n {name} link set lo up")
        yield names
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if carrier is not None:
            carrier.kill()
            carrier.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def open_end(name: str) -> int:
    """The descriptor of a host's new eth0."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return end


def carry(ends: Sequence[int], megabits: float, seconds: float) -> None:
    """Carry packets between two ends for as long as this process lives.

    Args:
        ends: Of the wire.
        megabits: Mbit/s in each direction.
        seconds: That a packet is on its way.
    """
    others = {ends[0]: ends[1], ends[1]: ends[0]}
    free = dict.fromkeys(ends, 0.0)  # when the wire has sent all that has come in at an end
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    while True:
        due = min((packets[0][0] for packets in waiting.values() if packets), default=None)
        timeout = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(ends, (), (), timeout)
        now = time.monotonic()
        for end in readable:
            packet = os.read(end, MTU + 64)
            begins = max(now, free[end])
            if begins - now < QUEUE_SECONDS:
                free[end] = begins + 8 * len(packet) / (1e6 * megabits)
                waiting[end].append((free[end] + seconds, packet))
        for end, packets in waiting.items():
            while packets and packets[0][0] <= now:
                with suppress(OSError):  # An end that is not up yet takes nothing.
                    os.write(others[end], packets.popleft()[1])


if __name__ == "__main__":
    first, second, rate, way = sys.argv[1:]
    both = [open_end(first), open_end(second)]
    print("ready", flush=True)
    carry(both, float(rate), float(way))
