"""A process of the run is killed or stopped at a random moment, set-up, checkpoints and the end included.

What must follow depends on the options and on how far the run was: see `promised`. More runs, about 5 s each:
``make faults RUNS=200``; ``FIRST`` is the seed of the first.
"""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import leaves_no_sockets
from digit_commands import COMMON, checkpoint, served
from lightning.pytorch import Callback

pytestmark = pytest.mark.cluster  # They wait for time-outs, and train meanwhile.

RUNS = int(os.environ.get("CNNSTRATEGIES_FAULTS", "2"))
FIRST = int(os.environ.get("CNNSTRATEGIES_FAULTS_FROM", "0"))
EPOCHS, STEPS = 3, 6  # of each epoch
LATEST = 3.0  # seconds after the coordinator's start; a run takes two to four
EQUAL = ("sync", "local")  # modes whose result does not depend on the timing
GOES_ON, ENDS = "goes on", "ends and says who died"


def draw(chance):
    mode = chance.choice(["sync", "async", "ssp", "local"])
    servers = chance.choice([1, 2])
    options = {
        "mode": mode,
        "servers": servers,
        "replication": chance.randint(1, servers),
        "max_restarts": chance.choice([0, 1]),
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
    after = chance.uniform(0, LATEST)
    return options, victim, how, after


def children(parent):
    """Number and name of the processes that a process has started, in order."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            number, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, rest = rest.rpartition(") ")
        if int(rest.split()[1]) == parent:
            found.append((int(rest.split()[19]), int(number), name))
    return [(number, name) for _, number, name in sorted(found)]


class Marks(Callback):
    """Says by files how far each rank is."""

    def on_train_epoch_start(self, trainer, pl_module):
        Path(f"epoch-{trainer.current_epoch}-{trainer.global_rank}").touch()

    def on_train_end(self, trainer, pl_module):
        Path(f"trained-{trainer.global_rank}").touch()


@dataclass
class Moment:
    """How far the run was when a process got its signal.

    Attributes:
        process: Which one.
        training: Both ranks had begun.
        last: A rank was in its last epoch, or after it.
        over: A rank had trained to the end.
        saved: Every server had a snapshot on the disk.
    """

    process: int
    training: bool
    last: bool
    over: bool
    saved: bool

    @classmethod
    def of(cls, process, servers):
        return cls(
            process,
            all(Path(f"epoch-0-{rank}").exists() for rank in range(2)),
            any(Path(f"epoch-{EPOCHS - 1}-{rank}").exists() for rank in range(2)),
            any(Path(f"trained-{rank}").exists() for rank in range(2)),
            len(list(Path("snapshots").glob("run-*/server-*/newest"))) == servers,
        )


class Fault(threading.Thread):
    """Finds the run below this process, and sends one signal to one of its processes."""

    def __init__(self, victim, servers, how, after):
        super().__init__(daemon=True)
        self.victim, self.servers, self.how, self.after = victim, servers, how, after
        self.place = ["coordinator", *(f"server {n}" for n in range(servers)), "worker 0", "worker 1"].index(victim)
        self.moment = None
        self.looked = self.over = False

    def run(self):
        began = None
        while not self.over:
            for run, _ in children(os.getpid()):
                processes = children(run)
                names = [name for _, name in processes]
                if began is None and "ps-coordinator" in names:
                    began = time.monotonic()
                    self.looked = True
                if began is not None and time.monotonic() - began >= self.after and "ps-coordinator" in names:
                    started = [number for number, _ in processes[names.index("ps-coordinator") :]]
                    if self.place < len(started):
                        self.moment = Moment.of(started[self.place], self.servers)
                        os.kill(self.moment.process, self.how)
                        return
            time.sleep(0.01)


def promised(options, victim, moment):
    """What docs/parameter-server.md says follows; both only where the moment may have been before or after a border."""
    if moment is None:
        return {GOES_ON}
    restarted = options["max_restarts"] > 0
    if victim.startswith("server"):
        if options["replication"] > 1:
            return {GOES_ON}
        if restarted and "snapshot_every" in options:
            return {GOES_ON} if moment.saved and not moment.over else {GOES_ON, ENDS}
    elif victim == "worker 1":
        return {GOES_ON} if restarted or moment.training else {GOES_ON, ENDS}
    elif victim == "coordinator" and restarted:
        return {GOES_ON, ENDS} if moment.over else {GOES_ON}
    elif victim == "worker 0" and restarted:
        return {GOES_ON, ENDS} if moment.last else {GOES_ON}
    return {GOES_ON, ENDS} if moment.over else {ENDS}


def keeps_everything(options, victim, moment):
    """Whether nothing may be lost that was acknowledged."""
    return moment is None or victim == "coordinator" or (victim.startswith("server") and options["replication"] > 1)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_keeps_what_its_options_promise(run_cli, quick, seed, tmp_path):
    options, victim, how, after = draw(random.Random(seed))
    print(f"{signal.Signals(how).name} to {victim} after {after:.2f} s of {options}")

    def fit(name):
        marks = "--trainer.callbacks+=test_parameter_server_random_faults.Marks"
        about = [marks, f"--trainer.logger.init_args.name={name}", f"--trainer.max_epochs={EPOCHS}"]
        return run_cli("fit", *quick, *COMMON, *served(**options), *about)

    fault = Fault(victim, options["servers"], how, after)
    with leaves_no_sockets():
        fault.start()
        code, output = fit("run")
        fault.over = True
        fault.join()
    print(fault.moment, output, sep="\n")
    assert fault.looked, "the run's processes were not seen"
    assert (GOES_ON if code == 0 else ENDS) in promised(options, victim, fault.moment)
    if code != 0:
        assert f"{victim} (process {fault.moment.process}" in output
        return
    versions = [checkpoint("run", version) for version in range(3) if checkpoint("run", version).exists()]
    got = torch.load(versions[-1], weights_only=True)
    assert got["epoch"] == EPOCHS - 1
    if not keeps_everything(options, victim, fault.moment):
        return
    assert "updates since then are lost" not in output
    if options.get("data_dispatch") != "dynamic":
        assert got["global_step"] == EPOCHS * STEPS
    if options["mode"] in EQUAL:
        kept = tmp_path.parent / f"whole-{options['mode']}.ckpt"
        if not kept.exists():
            code, output = fit("whole")
            assert code == 0, output
            kept.write_bytes(checkpoint("whole").read_bytes())
        for name, value in torch.load(kept, weights_only=True)["state_dict"].items():
            assert torch.allclose(got["state_dict"][name], value, rtol=1e-9, atol=1e-12), name
