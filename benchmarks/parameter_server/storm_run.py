"""A run on three hosts: its processes, what they print, and what becomes of those that end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hosts import environment
from quotas import Group
from storm_faults import find
from storm_host import Done, batches

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOSTS = 3
FIRST = 10  # batches of each worker before a run counts as begun
PATIENCE = 240.0  # seconds for that
STORE = "10.77.0.1:29400"  # torchrun's
# Of ddp, which goes back to the last checkpoint: more of them, one in about 10 s.
OFTEN = (
    "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
    "--trainer.callbacks.dirpath=checkpoints",
    "--trainer.callbacks.filename=often",
    "--trainer.callbacks.save_last=true",
    "--trainer.callbacks.every_n_train_steps=200",
    "--trainer.callbacks.enable_version_counter=false",
)


class Run:
    """A run, started on all hosts.

    Args:
        strategy: ``parameter server`` or ``ddp``.
        names: Of the hosts, and of one more that only looks.
        groups: Of processes, one for each host.
        folder: Where the hosts' files are.

    Attributes:
        ends: When a host's own process has ended, which host, and with which exit code.
    """

    def __init__(self, strategy: str, names: Sequence[str], groups: Sequence[Group], folder: Path) -> None:
        self.ends: list[tuple[float, int, int]] = []
        self._served = strategy == "parameter server"
        self._names, self._groups, self._folder = names, groups, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._noticed: set[int] = set()
        self._watch: subprocess.Popen[bytes] | None = None
        if self._served:
            keys = [sys.executable, "-c", "from cnnstrategies.cli import server; server()", "--make-keys", "run.key"]
            subprocess.run(keys, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            words = [str(HERE / "storm_watch.py"), "tcp://10.77.0.1:7000", "run.key", "members"]
            self._watch = self._popen(HOSTS, [sys.executable, *words])
        for host in range(HOSTS):
            self._start(host)

    def begin(self, cores: float) -> None:
        """Wait until all workers train; then each host has its quota.

        Raises:
            SystemExit: They do not.
        """
        deadline = time.monotonic() + PATIENCE
        while any(len(self.batches(host)) < FIRST for host in range(HOSTS)):
            self.look()
            if self.ends or time.monotonic() > deadline:
                raise SystemExit("the run has not begun; see the hosts' outputs with --outputs")
            time.sleep(0.1)
        for group in self._groups:
            group.limit(cores)

    def wait(self, until: float) -> None:
        """Wait until a moment, and look after the processes meanwhile."""
        while (left := until - time.monotonic()) > 0:
            self.look()
            time.sleep(min(left, 0.1))

    def look(self) -> None:
        """Start again what starts a host's part, where it has ended.

        Under torchrun each host's agent is started again, as a machine's service would. A run with a parameter server
        goes on without a host whose `fit` has ended; when all have ended, all are started again.
        """
        for host, process in self._processes.items():
            if process.poll() is not None and process.pid not in self._noticed:
                self._noticed.add(process.pid)
                self.ends.append((time.monotonic(), host, process.returncode))
                print(f"host {host}: its own process has ended with exit code {process.returncode}", flush=True)
        again = [host for host, process in self._processes.items() if process.poll() is not None]
        if again and (not self._served or len(again) == HOSTS):
            for host in again:
                self._start(host)

    def find(self, host: int, role: str) -> int | None:
        """A process of a host; of ddp, whichever is asked for, its rank."""
        return find(self._groups[host], role if self._served else "worker")

    def batches(self, host: int) -> list[Done]:
        """Return the batches that the host's worker has finished."""
        return batches(self._folder, host)

    def stop(self) -> None:
        """Have the run stop with a checkpoint; after a while, end whatever still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 30
        while any(process.poll() is None for process in self._processes.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.end()

    def end(self) -> None:
        """Kill all processes of the hosts."""
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait()
        for group in self._groups:
            group.end()

    def _start(self, host: int) -> None:
        fit = [str(ROOT / "cli.py"), "fit", "--config", str(HERE / "storm.yaml")]
        if not self._served:
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", STORE, "--rdzv-id", "storm"]
            agent = ["-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", "1", *rendezvous]
            agent += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", f"10.77.0.{host + 1}"]
            fit = [*agent, "--max-restarts", "1000", *fit, "--trainer.strategy=ddp", *OFTEN]
        self._processes[host] = self._popen(host, [sys.executable, *fit])

    def _popen(self, host: int, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        variables = environment(host, [ROOT, HERE, HERE.parent / "pipeline"], PYTHONUNBUFFERED=1)
        enter = self._groups[host].enter if host < HOSTS else None
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *words],
            cwd=self._folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=enter,
        )
        threading.Thread(target=self._keep, args=(process, host), daemon=True).start()
        return process

    def _keep(self, process: "subprocess.Popen[bytes]", host: int) -> None:
        """Write down what a host prints, and when."""
        assert process.stdout is not None
        with (self._folder / f"output-{host}").open("ab", buffering=0) as file:
            for line in process.stdout:
                file.write(f"{time.monotonic():.2f} ".encode() + line)
