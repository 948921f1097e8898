"""A real SLURM cluster of two nodes on this machine, with all files in one directory, on the loopback only."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes_of import wait_until
from tests.runner.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
CPUS = 8


def missing() -> str | None:
    """Return the reason why this machine cannot have a SLURM cluster, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a SLURM cluster for tests needs root on Linux"
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(absent)} (Debian: apt-get install slurm-wlm munge)" if absent else None


@dataclass(frozen=True)
class Slurm:
    """A running SLURM cluster.

    Attributes:
        environment: Environment in which SLURM's commands find this cluster.
        root: Directory of all its files.
    """

    environment: dict[str, str]
    root: Path

    def run(self, *command: object, check: bool = True) -> str:
        """Run one of SLURM's commands and return its output."""
        ended = subprocess.run(
            [str(word) for word in command], env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0 or not check, ended.stdout + ended.stderr
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return SLURM's information about a job, by field."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_the_end(self, number: str, report: Callable[[], str], seconds: float = 150) -> None:
        """Wait for the end of a job. Each question to SLURM starts a program, so the pauses are long."""
        goes_on = ("PENDING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.job(number)["JobState"] not in goes_on, report, seconds, pause=0.5)

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for the message of a failed test."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.root.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Slurm]:
    """Start munged, slurmctld and a slurmd for each node; end them and their jobs' processes afterwards."""
    # The directory is not below pytest's: munged needs every directory above its socket to be open to all users.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, contextlib.ExitStack() as at_end:
        root = Path(directory)
        root.chmod(0o755)
        _write_configuration(root, [free_port() for _ in range(1 + len(NODES))])
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        slurm = Slurm({**os.environ, "PATH": path, "SLURM_CONF": str(root / "slurm.conf")}, root)

        def start(name: str, *command: str) -> None:
            with open(root / f"{name}.out.log", "wb") as log:
                daemon = subprocess.Popen(
                    command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True
                )
            at_end.callback(_end, daemon)

        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        start("munged", "munged", "--foreground", *(f"--{name}={root}/munge.{name}" for name in files))
        wait_until((root / "munge.socket").exists, slurm.logs)
        start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node)
        idle = ["idle", str(len(NODES))]
        wait_until(lambda: slurm.run("sinfo", "-h", "-o", "%T %D", check=False).split() == idle, slurm.logs)
        at_end.callback(_cancel_all, slurm)
        yield slurm


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _cancel_all(slurm: Slurm) -> None:
    slurm.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
    slurm.run("scancel", "--user=root", check=False)
    deadline = time.monotonic() + 20
    while slurm.run("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
        time.sleep(0.2)


def _write_configuration(root: Path, ports: list[int]) -> None:
    (root / "munge.key-file").write_bytes(os.urandom(128))
    (root / "munge.key-file").chmod(0o400)
    host = socket.gethostname()
    for node in NODES:
        (root / node).mkdir()
    controller, *node_ports = ports
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": controller,
        "FirstJobId": 100 * controller,  # Jobs of different clusters have different numbers.
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        # This is also the time that a requeued job waits.
        "AuthInfo": f"socket={root}/munge.socket,cred_expire=5",
        "StateSaveLocation": root / "state",
        "SlurmdSpoolDir": f"{root}/%n/spool",
        "SlurmctldPidFile": root / "slurmctld.pid",
        "SlurmdPidFile": f"{root}/%n/slurmd.pid",
        "TmpFS": f"{root}/%n",
        "SlurmctldLogFile": root / "slurmctld.log",
        "SlurmdLogFile": f"{root}/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": 2,
        "KillWait": 5,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=20000"
        for node, port in zip(NODES, node_ports, strict=True)
    ]
    every = ",".join(NODES)
    lines.append(f"PartitionName=low Nodes={every} Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=30")
    lines.append(f"PartitionName=high Nodes={every} MaxTime=60 State=UP PriorityTier=2 PreemptMode=OFF")
    (root / "state").mkdir()
    (root / "slurm.conf").write_text("\n".join(lines) + "\n")
    (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
