"""Tests in which a process of a run is killed or stopped at a random moment, also in set-up, checkpoints and the end.

The expected result depends on the strategy, its options and the progress of the run: see `promised`. For more runs,
about 5 s each, use ``make faults RUNS=200``; ``FIRST`` is the seed of the first run. Each run appends a line to the
file that ``CNNSTRATEGIES_FAULTS_LOG`` names. No run starts after ``CNNSTRATEGIES_FAULTS_UNTIL``, in seconds since 1970.
"""

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from cnnstrategies.callbacks import summary
from cnnstrategies.runtime.processes import one_refusal
from tests.runner import warm
from tests.runner.forked import leaves_no_sockets
from tests.strategies.digit_commands import COMMON, checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.warm]  # These tests wait for time-outs.

RUNS = int(os.environ.get("CNNSTRATEGIES_FAULTS", "2"))
FIRST = int(os.environ.get("CNNSTRATEGIES_FAULTS_FROM", "0"))
UNTIL = float(os.environ.get("CNNSTRATEGIES_FAULTS_UNTIL", "inf"))
EPOCHS, STEPS = 3, 6  # Number of epochs, and of steps in an epoch.
PASSING = 0.05  # Seconds after which helper processes of an import, such as uname, have ended.
LATEST = 3.0  # Seconds after the coordinator's start. A run takes two to four seconds.
EQUAL = ("sync", "local")  # Modes whose result does not depend on timing.
GOES_ON, ENDS = "goes on", "ends and says who died"


@dataclass
class Fault:
    """A signal to one process of a run.

    Attributes:
        strategy: Registered name of the strategy.
        start: Start method of the processes.
        options: Options of the strategy.
        processes: Names of the run's processes in the order of their starts.
        victim: Name of the process that gets the signal.
        how: The signal.
        after: Seconds from the start of the run's processes to the signal.
    """

    strategy: str
    start: str
    options: dict
    processes: list
    victim: str
    how: signal.Signals
    after: float

    @property
    def words(self):
        """Command-line arguments of the strategy."""
        kind = {"parameter_server": "ParameterServer", "hybrid_pipeline": "HybridPipeline", "ddp": "DDP"}
        options = {**self.options, "start_method": self.start}
        return [
            f"--trainer.strategy.class_path={kind[self.strategy]}Strategy",
            f"--trainer.devices={2 if self.strategy == 'parameter_server' else len(self.processes)}",
            *(f"--trainer.strategy.init_args.{name}={value}" for name, value in options.items()),
        ]


def draw(seed):
    chance = random.Random(seed)
    start = chance.choice(["fork", "spawn", "popen"])
    strategy = chance.choice(["ddp", "hybrid_pipeline", "parameter_server", "parameter_server"])
    if strategy == "parameter_server":
        return draw_for_servers(chance, start)
    replicas, options = [2], {}
    if strategy == "hybrid_pipeline":
        replicas = chance.choice([[1, 1], [2, 1], [1, 2]])
        options = {"replicas": replicas, "cuts": ["2"], "microbatches": 4, "timeout": "0:00:30"}
    ranks = [f"rank {rank}" for rank in range(sum(replicas))]
    return Fault(strategy, start, options, ranks, chance.choice(ranks), signal.SIGKILL, chance.uniform(0, LATEST))


def draw_for_servers(chance, start):
    mode = chance.choice(["sync", "async", "ssp", "local"])
    servers = chance.choice([1, 2])
    options = {
        "mode": mode,
        "servers_per_node": servers,
        "replication": chance.randint(1, servers),
        "max_restarts": chance.choice([0, 1]),
        "timeout": 3,
    }
    if mode == "ssp":
        options |= {"staleness": 2}
    if mode in ("async", "ssp"):
        options |= {"data_dispatch": chance.choice(["static", "dynamic"])}
    victim = chance.choice(["worker 0", "worker 1", "worker 1", "server 0", f"server {servers - 1}", "coordinator"])
    how = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    if victim == "coordinator" and options["max_restarts"]:
        options["timeout"] = 20  # The other processes wait this long for the next coordinator to start.
    processes = ["coordinator", *(f"server {n}" for n in range(servers)), "worker 0", "worker 1"]
    return Fault("parameter_server", start, options, processes, victim, how, chance.uniform(0, LATEST))


def children(parent):
    """Return id and name of each child of a process, in the order of their starts."""
    processes = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            number, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, rest = rest.rpartition(") ")
        if int(rest.split()[1]) == parent:
            processes.append((int(rest.split()[19]), int(number), name))
    return [(number, name) for _, number, name in sorted(processes)]


def incarnations(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


class Marks(Callback):
    """A callback that records each rank's progress in files, and turns off plots, which take longer than most runs."""

    def setup(self, trainer, pl_module, stage):
        summary.draw_curves = lambda *_: None

    def on_train_epoch_start(self, trainer, pl_module):
        Path(f"epoch-{trainer.current_epoch}-{trainer.global_rank}").touch()

    def on_train_end(self, trainer, pl_module):
        Path(f"trained-{trainer.global_rank}").touch()


class Moment:
    """Progress of the run when a process gets the signal.

    Attributes:
        process: Id of the process.
        training: Whether both ranks have started the first epoch.
        last: Whether a rank has started the last epoch.
        over: Whether a rank has finished training.
    """

    def __init__(self, process):
        self.process = process
        self.training = all(Path(f"epoch-0-{rank}").exists() for rank in range(2))
        self.last = any(Path(f"epoch-{EPOCHS - 1}-{rank}").exists() for rank in range(2))
        self.over = any(Path(f"trained-{rank}").exists() for rank in range(2))


class Sender(threading.Thread):
    """A thread that finds the run among this process's children and sends the signal."""

    def __init__(self, fault):
        super().__init__(daemon=True)
        self.fault = fault
        self.moment = None
        self.looked = self.over = False
        self._seen = {}  # By process id: the time at which the process was first seen.
        self._all = []

    def run(self):
        began = None
        while not self.over:
            for run, _ in children(os.getpid()):
                processes = self.of(run)
                if began is None and processes:
                    began = time.monotonic()
                    self.looked = True
                if began is not None and time.monotonic() - began >= self.fault.after:
                    place = self.fault.processes.index(self.fault.victim)
                    if place < len(processes):
                        if incarnations(processes[place]):
                            self.moment = Moment(processes[place])
                            os.kill(self.moment.process, self.fault.how)
                        return
            time.sleep(0.01)

    def of(self, run):
        """Return the ids of a run's processes so far. Once all have started, an ended process keeps its position."""
        if len(self._all) < len(self.fault.processes):
            self._all = self._children(run)
        return self._all

    def _children(self, run):
        now = time.monotonic()
        processes = [entry for entry in children(run) if now - self._seen.setdefault(entry[0], now) >= PASSING]
        processes = [(number, name) for number, name in processes if name != warm.HELPER]
        numbers = [number for number, _ in processes]
        if self.fault.strategy == "parameter_server":
            names = [name for _, name in processes]
            if "ps-coordinator" not in names:
                return []
            numbers = numbers[names.index("ps-coordinator") :]
        elif self.fault.start == "popen":
            return [run, *numbers] if numbers else []
        return numbers


def promised(fault, moment):
    """Return the results that docs/parameter-server.md allows.

    Both results are allowed only if the progress of the run is not known exactly enough to tell.
    """
    options, victim = fault.options, fault.victim
    if moment is None:
        return {GOES_ON}
    if fault.strategy != "parameter_server":
        return {GOES_ON, ENDS} if moment.over else {ENDS}
    restarted = options["max_restarts"] > 0
    if victim.startswith("server"):
        if options["replication"] > 1:
            return {GOES_ON}
    elif victim == "worker 1":
        return {GOES_ON} if restarted or moment.training else {GOES_ON, ENDS}
    elif victim == "coordinator" and restarted:
        return {GOES_ON, ENDS} if moment.over else {GOES_ON}
    elif victim == "worker 0" and restarted:
        return {GOES_ON, ENDS} if moment.last else {GOES_ON}
    return {GOES_ON, ENDS} if moment.over else {ENDS}


def keeps_everything(options, victim, moment):
    """Whether no acknowledged update may be lost."""
    return moment is None or victim == "coordinator" or (victim.startswith("server") and options["replication"] > 1)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_run_keeps_what_its_options_promise(run_cli, quick, seed, tmp_path):
    if time.time() > UNTIL:
        return
    fault = draw(seed)
    print(fault)
    resource_tracker.ensure_running()  # If the run started its own tracker, it would be taken for a rank.

    def fit(name):
        marks = "--trainer.callbacks+=tests.strategies.test_random_faults.Marks"
        about = [marks, f"--trainer.logger.init_args.name={name}", f"--trainer.max_epochs={EPOCHS}"]
        return run_cli("fit", *quick, *COMMON, *fault.words, *about)

    sender = Sender(fault)
    with leaves_no_sockets():
        sender.start()
        code, output = fit("run")
        sender.over = True
        sender.join()
        with one_refusal():
            pass  # A killed launcher leaves a link that the next run removes.
    moment = sender.moment
    print(moment and vars(moment), output, sep="\n")
    log_how(fault, moment, code)
    assert sender.looked, "the run's processes were not seen"
    assert "sync_dist=True" not in output, "Lightning has advice about a value that this package logs"
    assert (GOES_ON if code == 0 else ENDS) in promised(fault, moment)
    for path in Path().rglob("*.ckpt"):
        torch.load(path, weights_only=True)
    if code != 0:
        is_named(fault, moment, output)
    elif fault.strategy == "parameter_server":
        keeps_what_it_has(fault, moment, output, fit, tmp_path.parent / f"whole-{fault.options['mode']}.ckpt")


def log_how(fault, moment, code):
    if path := os.environ.get("CNNSTRATEGIES_FAULTS_LOG"):
        how = fault.how.name if moment is not None else "none in time"
        line = [fault.strategy, fault.start, fault.victim.split()[0], how, GOES_ON if code == 0 else ENDS]
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")


def is_named(fault, moment, output):
    if fault.strategy == "parameter_server":
        assert f"{fault.victim} (process {moment.process}" in output
    elif (fault.start, fault.victim) != ("popen", "rank 0"):  # The shell reports the death of this process.
        lightning = f"[{fault.victim.replace(' ', ': ')}] Child process with PID {moment.process} terminated"
        assert f"{fault.victim} was ended by SIGKILL" in output or lightning in output


def keeps_what_it_has(fault, moment, output, fit, kept):
    options = fault.options
    versions = [checkpoint("run", version) for version in range(3) if checkpoint("run", version).exists()]
    got = torch.load(versions[-1], weights_only=True)
    assert got["epoch"] == EPOCHS - 1
    if not keeps_everything(options, fault.victim, moment):
        return
    assert "updates since then are lost" not in output
    if options.get("data_dispatch") != "dynamic":
        assert got["global_step"] == EPOCHS * STEPS
    if options["mode"] in EQUAL:
        if not kept.exists():
            code, output = fit("whole")
            assert code == 0, output
            kept.write_bytes(checkpoint("whole").read_bytes())
        for name, value in torch.load(kept, weights_only=True)["state_dict"].items():
            assert torch.allclose(got["state_dict"][name], value, rtol=1e-9, atol=1e-12), name
