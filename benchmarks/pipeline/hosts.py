"""Hosts on one machine: network namespaces on a bridge, each with a link of limited bandwidth.

Every host has eth0 with the address 10.77.0.<number>, limited by `tc` in both directions. Needs root and iproute2.
Their names have this process's number, so that two scripts do not meet.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ranks import sh

PREFIX = f"cnnbench{os.getpid()}"
SWITCH = f"{PREFIX}-switch"


def missing() -> str | None:
    """Why hosts cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"iproute2 is not installed: {' and '.join(absent)} not found"
    probe = subprocess.run(["ip", "netns", "add", f"{PREFIX}-probe"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces cannot be made: {probe.stderr.strip()}"
    sh(f"ip netns del {PREFIX}-probe")
    return None


@contextmanager
def hosts(count: int, megabits: int) -> Iterator[list[str]]:
    """Names of that many hosts; they are removed at the end.

    Args:
        count: Number of hosts.
        megabits: Bandwidth of each host's link in Mbit/s, in each direction.
    """
    names = [f"{PREFIX}-{number}" for number in range(count)]
    switch = SWITCH
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that `timeout` leaves none behind.
    try:
        sh(f"ip netns add {switch}")
        sh(f"ip -n {switch} link add bridge0 type bridge && ip -n {switch} link set bridge0 up")
        for number, name in enumerate(names):
            sh(f"ip netns add {name}")
            sh(f"ip link add eth0 netns {name} type veth peer name port{number} netns {switch}")
            sh(f"ip -n {switch} link set port{number} master bridge0 up")
            sh(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            sh(f"ip -n {name} link set eth0 up && ip -n {name} link set lo up")
        limit(names, megabits)
        yield names
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice.
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        signal.signal(signal.SIGTERM, before)


def limit(names: Sequence[str], megabits: int) -> None:
    """Give the hosts' links another bandwidth.

    Args:
        names: All hosts.
        megabits: Mbit/s in each direction.
    """
    # What may pass at once after a pause: two milliseconds' worth, else small messages would not notice the limit.
    shape = shaped(megabits, max(32, megabits // 4))
    for number, name in enumerate(names):
        sh(f"ip netns exec {name} tc qdisc replace dev eth0 {shape}")
        sh(f"ip netns exec {SWITCH} tc qdisc replace dev port{number} {shape}")


def shaped(megabits: int, burst: int) -> str:
    """Return the arguments of `tc qdisc replace` for a limit.

    It has a handle of its own: one that were changed would wait for ever with a packet that is larger than its burst.

    Args:
        megabits: Mbit/s.
        burst: KB that may pass at once.
    """
    return f"root handle {megabits:x}: tbf rate {megabits}mbit burst {burst}kb latency 50ms"


def environment(host: int, paths: Sequence[Path], **more: object) -> dict[str, str]:
    """For one of several commands of a run, each on a host of its own, that find each other by Lightning's variables.

    Args:
        host: Its number.
        paths: Where Python looks for modules.
        more: Further variables.
    """
    variables = {
        "HOST": host,
        "NODE_RANK": host,
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": 29700,
        "OMP_NUM_THREADS": 1,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        **more,
    }
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def run_on(names: Sequence[str], command: Sequence[str], timeout: float) -> str:
    """Run a command on every host, with RANK, WORLD_SIZE and the address of the first host in the environment.

    Returns:
        What the first host printed.
    """
    processes = []
    for rank, name in enumerate(names):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        output = subprocess.PIPE if rank == 0 else None
        processes.append(
            subprocess.Popen(["ip", "netns", "exec", name, *command], env=environment, stdout=output, text=True)
        )
    try:
        printed, _ = processes[0].communicate(timeout=timeout)
        for process in processes:
            if process.wait(timeout=60):
                raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    finally:
        for process in processes:
            process.kill()
    return printed
