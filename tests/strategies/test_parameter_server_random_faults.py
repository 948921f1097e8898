"""A process of the run is killed or stopped at a random moment, set-up, checkpoints and the end included.

More runs, about 5 s each: ``CNNSTRATEGIES_FAULTS=200``; the seed of the first: ``CNNSTRATEGIES_FAULTS_FROM``.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import leaves_no_sockets
from test_hybrid_pipeline import COMMON
from test_parameter_server import served

RUNS = int(os.environ.get("CNNSTRATEGIES_FAULTS", "3"))
FIRST = int(os.environ.get("CNNSTRATEGIES_FAULTS_FROM", "0"))
EPOCHS = 3
LATEST = 3.0  # seconds after the coordinator's start; a run takes two to four


def draw(chance):
    mode = chance.choice(["sync", "async", "ssp", "local"])
    servers = chance.choice([1, 2])
    options = {
        "mode": mode,
        "servers": servers,
        "replication": chance.randint(1, servers),
        "max_restarts": chance.choice([0, 1]),
        "heartbeat": 0.2,
        "timeout": 3,
    }
    if mode == "ssp":
        options |= {"staleness": 2}
    if mode in ("async", "ssp"):
        options |= {"data_dispatch": chance.choice(["static", "dynamic"])}
    if chance.random() < 0.5:
        options |= {"snapshot_every": 5, "snapshot_directory": "snapshots"}
    victim = chance.choice(["worker 0", "worker 1", "worker 1", "server 0", f"server {servers - 1}", "coordinator"])
    how = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    return options, victim, how, chance.uniform(0, LATEST)


def children(parent):
    """Number and name of the processes that a process has started, in order."""
    found = []
    for directory in Path("/proc").iterdir():
        try:
            number, _, rest = directory.joinpath("stat").read_text().partition(" (")
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            continue
        name, _, rest = rest.rpartition(") ")
        if int(rest.split()[1]) == parent:
            found.append((int(rest.split()[19]), int(number), name))
    return [(number, name) for _, number, name in sorted(found)]


class Fault(threading.Thread):
    """Finds the run below this process, and sends one signal to one of its processes."""

    def __init__(self, victim, servers, how, after):
        super().__init__(daemon=True)
        self.victim, self.how, self.after = victim, how, after
        self.place = ["coordinator", *(f"server {n}" for n in range(servers)), "worker 0", "worker 1"].index(victim)
        self.sent = None
        self.over = False

    def run(self):
        began = None
        while not self.over:
            for run, _ in children(os.getpid()):
                processes = children(run)
                names = [name for _, name in processes]
                if began is None and "ps-coordinator" in names:
                    began = time.monotonic()
                if began is not None and time.monotonic() - began >= self.after and "ps-coordinator" in names:
                    started = [number for number, _ in processes[names.index("ps-coordinator") :]]
                    if self.place < len(started):
                        self.sent = started[self.place]
                        os.kill(self.sent, self.how)
                        return
            time.sleep(0.01)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_survives_or_ends_and_says_who_died(run_cli, quick, seed):
    options, victim, how, after = draw(random.Random(seed))
    print(f"{signal.Signals(how).name} to {victim} after {after:.2f} s of {options}")
    fault = Fault(victim, options["servers"], how, after)
    with leaves_no_sockets():
        fault.start()
        code, output = run_cli("fit", *quick, *COMMON, *served(**options), f"--trainer.max_epochs={EPOCHS}")
        fault.over = True
        fault.join()
        print(output)
    if code == 0:
        last = max(Path("runs").glob("*/version_*/checkpoints/last.ckpt"), key=os.path.getmtime)
        assert torch.load(last, weights_only=True)["epoch"] == EPOCHS - 1
    else:
        assert fault.sent is not None, "nobody was killed"
        assert f"{victim} (process {fault.sent}" in output
