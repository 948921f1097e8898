"""Faults of processes and links: a seeded schedule, and how each is played from outside."""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hosts import SWITCH, limit, shaped
from quotas import Group
from ranks import sh

MEGABITS = 1000
BAD_MEGABITS = 100  # of a bad link: what is sent faster waits in a queue of 50 ms, or is lost
LOSS = 0.01  # of a bad link's packets, in each direction
RANDOM = 0xFFFFF000 + 56  # where a packet filter reads a random number: SKF_AD_OFF + SKF_AD_RANDOM


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: For the page.
        target: The part that is hit: ``worker``, ``server``, ``coordinator`` or ``link``.
        how: ``kill``, ``stop``, ``down`` or ``bad``.
        hosts: On which hosts.
        least: Seconds that it lasts at least; a kill has no length.
        most: Seconds that it lasts at most.
        replaced: Whether the part that is hit is started again.
    """

    name: str
    target: str
    how: str
    hosts: tuple[int, ...]
    least: float = 0.0
    most: float = 0.0
    replaced: bool = False


ALL, OTHERS, FIRST = (0, 1, 2), (1, 2), (0,)
# The time-out is 8 s; a coordinator that is stopped is ended after half of it.
KINDS = (
    Kind("a worker is killed", "worker", "kill", OTHERS, replaced=True),
    Kind("rank 0 is killed", "worker", "kill", FIRST, replaced=True),
    Kind("a server is killed", "server", "kill", ALL, replaced=True),
    Kind("the coordinator is killed", "coordinator", "kill", FIRST, replaced=True),
    Kind("a worker is stopped for 3 to 7 s", "worker", "stop", ALL, 3, 7),
    Kind("a worker is stopped for 13 to 17 s", "worker", "stop", ALL, 13, 17, replaced=True),
    Kind("a server is stopped for 3 to 7 s", "server", "stop", ALL, 3, 7),
    Kind("a server is stopped for 13 to 17 s", "server", "stop", ALL, 13, 17, replaced=True),
    Kind("the coordinator is stopped for 2 to 4 s", "coordinator", "stop", FIRST, 2, 4),
    Kind("a link is down for 2 to 6 s", "link", "down", ALL, 2, 6),
    Kind("a link is down for 12 to 16 s", "link", "down", OTHERS, 12, 16, replaced=True),
    Kind("a link is bad for 10 to 20 s", "link", "bad", ALL, 10, 20),
)


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule.

    Attributes:
        kind: Index of its kind.
        host: Where.
        at: When, in seconds from the beginning of the storm.
        seconds: How long it lasts; 0 for a kill.
    """

    kind: int
    host: int
    at: float
    seconds: float


def schedule(seed: int, seconds: float, an_hour: float) -> list[Fault]:
    """Faults of all kinds in turn, in an order by chance: each kind comes once before any comes again.

    Args:
        seed: The same gives the same.
        seconds: How long the storm lasts.
        an_hour: How many faults there are in an hour, on average; between two are half to one and a half of the mean.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    deck: list[int] = []
    at = 0.0
    while (at := at + 3600 / an_hour * chance.uniform(0.5, 1.5) * (0.5 if not faults else 1)) < seconds:
        if not deck:
            deck = chance.sample(range(len(KINDS)), len(KINDS))
        number = deck.pop()
        kind = KINDS[number]
        faults.append(Fault(number, chance.choice(kind.hosts), at, chance.uniform(kind.least, kind.most)))
    return faults


def find(group: Group, role: str) -> int | None:
    """The process of a host that is a worker, the server or the coordinator; None if it is not there."""
    fits = {}
    for pid in map(int, (group.folder / "cgroup.procs").read_text().split()):
        try:
            title = Path(f"/proc/{pid}/comm").read_text().strip()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if role != "worker" and title.startswith(f"ps-{role}"):
            return pid
        if b"\0fit\0" in command and not title.startswith("ps-"):
            fits[pid] = int(status.partition("PPid:")[2].split()[0])
    # The process that has started `fit`, or torchrun's agent, is not hit.
    return next((pid for pid, parent in fits.items() if role == "worker" and parent in fits), None)


def play(kind: Kind, fault: Fault, pid: int | None, names: Sequence[str]) -> None:
    """Do it, for as long as it lasts.

    Args:
        kind: Of the fault.
        fault: What happens.
        pid: The process that is hit; None for a link.
        names: Of the hosts.
    """
    if pid is not None:
        _send(pid, signal.SIGKILL if kind.how == "kill" else signal.SIGSTOP)
        time.sleep(fault.seconds)
        if kind.how == "stop":
            _send(pid, signal.SIGCONT)
        return
    port = f"port{fault.host}"
    if kind.how == "down":
        sh(f"ip -n {SWITCH} link set {port} down")
        time.sleep(fault.seconds)
        sh(f"ip -n {SWITCH} link set {port} up")
        return
    _make_bad(names[fault.host], port)
    time.sleep(fault.seconds)
    limit(names, MEGABITS)
    for place, device in ((SWITCH, port), (names[fault.host], "eth0")):
        sh(f"ip netns exec {place} tc qdisc del dev {device} ingress")


def _make_bad(name: str, port: str) -> None:
    """Lose packets by chance and let others wait. A packet filter and tbf do it: not every kernel has netem."""
    shape = shaped(BAD_MEGABITS, BAD_MEGABITS // 4)
    # Load a random number; if it is above the share that is lost, go on with what other filters say; else drop.
    passes = f"4,32 0 0 {RANDOM},53 1 0 {round(LOSS * 2**32)},6 0 0 2,6 0 0 {2**32 - 1},"
    for place, device in ((SWITCH, port), (name, "eth0")):
        sh(f"ip netns exec {place} tc qdisc replace dev {device} {shape}")
        sh(f"ip netns exec {place} tc qdisc add dev {device} ingress")
        sh(f"ip netns exec {place} tc filter add dev {device} ingress bpf bytecode '{passes}' direct-action")


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return  # It has been ended meanwhile.
