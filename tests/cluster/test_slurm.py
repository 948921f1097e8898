"""Jobs that our `submit` hands to a real SLURM of two nodes, started here for the purpose."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from slurm_cluster import CPUS, NODES, Slurm, missing, slurm_cluster

from cnnstrategies.paramserver.drivers.line import Watcher
from cnnstrategies.paramserver.places import RunAddress
from cnnstrategies.paramserver.security import KeyPair

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("slurm"),  # They share one cluster, but for those that wait longest.
]

TWO_NODES = f"""
trainer: {{num_nodes: 2, devices: 1, enable_progress_bar: false, enable_model_summary: false}}
cluster:
  partition: low
  time: "30"
  # Two nodes on one machine: their names lead nowhere.
  setup: [export MASTER_ADDR=127.0.0.1, "export PYTHONPATH={ROOT}", export OMP_NUM_THREADS=1]
"""
# Mixing is on: a resumed run must draw what the uninterrupted one draws.
RUN = [
    *("--model.init_args.mixup_alpha=0.2", "--trainer.max_epochs=12"),
    *("--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1"),
]
HYBRID = "--config=" + str(ROOT / "configs/experiments/digits_smallcnn_hybrid_1-1_cpu.yaml")
QUICKSTART = "--config=" + str(ROOT / "configs/quickstart.yaml")
RUNS = ("PENDING", "RUNNING", "COMPLETING")
SERVER = "--trainer.strategy.init_args"
PARAMETER_SERVER = (QUICKSTART, "--trainer.strategy=ParameterServerStrategy", f"{SERVER}.key_file=run.key")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as running:
        yield running


def wait_for(slurm: Slurm, condition: Callable[[], object], what: str, said: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        logs = "".join(f"{path}:\n{path.read_text()}" for path in sorted(Path().glob("*.log")))
        assert time.monotonic() < deadline, f"{what}: not within 120 s\n{said()}\n{logs}\n{slurm.logs()}"
        time.sleep(0.1)


class Job:
    """A job that `cnnstrategies submit fit` has queued."""

    def __init__(self, slurm: Slurm, run_cli: Callable[..., tuple[int, str]], *args: str) -> None:
        Path("two_nodes.yaml").write_text(TWO_NODES)
        os.environ |= slurm.environment
        configs = [arg for arg in args if arg.startswith("--config=")]
        options = [arg for arg in args if arg not in configs]
        code, output = run_cli("submit", "fit", *configs, "--config=two_nodes.yaml", *options)
        assert code == 0, output
        self.slurm = slurm
        self.number = re.search(r"Submitted job (\d+): ", output)[1]
        self.folder = Path(re.search(r"Logs, checkpoints and script: (\S+) ", output)[1])

    @property
    def state(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    @property
    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints/last.ckpt"

    def warn(self) -> None:
        """What SLURM does before the time limit: the signal goes to the processes, not to the script."""
        self.slurm.run("scancel", "--signal=USR1", self.number)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        wait_for(self.slurm, condition, what, lambda: f"{self.state}\n{self.log}")

    def wait_until_requeued(self) -> None:
        self.wait_for(lambda: (self.state["JobState"], self.state["Restarts"]) == ("PENDING", "1"), "requeued")

    def wait_for_end(self, restarts: int) -> None:
        self.wait_for(lambda: self.state["JobState"] not in RUNS, "the job's end")
        state = self.state
        assert (state["JobState"], state["Restarts"]) == ("COMPLETED", str(restarts)), f"{state}\n{self.log}"


@pytest.mark.xdist_group("interrupted")
def test_interrupted_jobs_go_on_exactly(slurm, run_cli):
    """On 2 nodes, two jobs warned of their end and one pre-empted: the weights are those of unbroken runs."""
    KeyPair.create().save("run.key")
    # The hybrid pipeline gives way, whether the others run or wait at that moment.
    hybrid = Job(slurm, run_cli, HYBRID, *RUN, f"--cluster.cpus_per_task={CPUS - 2}")
    ddp = Job(slurm, run_cli, QUICKSTART, *RUN, "--cluster.partition=high")
    encrypted = f"{SERVER}.security=curve"  # Two nodes on one machine would do without.
    server = Job(slurm, run_cli, *PARAMETER_SERVER, encrypted, *RUN, "--cluster.partition=high")

    def preempt():
        """A more important job comes; SLURM tells the pipeline with SIGTERM."""
        slurm.run("sbatch", "--partition=high", "--nodes=2", "--ntasks-per-node=3", "--output=/dev/null", "--wrap=true")

    interruptions = {hybrid: preempt, ddp: ddp.warn, server: server.warn}

    def all_are_interrupted():
        for job in [job for job in interruptions if job.last.exists()]:
            interruptions.pop(job)()
        return not interruptions

    server.wait_for(all_are_interrupted, "checkpoints")
    whole = {
        ddp: _uninterrupted(run_cli, QUICKSTART, "--trainer.strategy=ddp_fork"),
        server: _uninterrupted(run_cli, QUICKSTART, "--trainer.strategy=parameter_server_fork"),
        hybrid: _uninterrupted(run_cli, HYBRID, "--trainer.strategy.init_args.start_method=fork"),
    }
    for job, name in ((ddp, "SIGUSR1"), (server, "SIGUSR1"), (hybrid, "SIGTERM")):
        job.wait_for_end(restarts=1)
        assert f"{name}: stopping after this step" in job.log
        assert "Restored all states" in job.log
        ended = torch.load(job.last, weights_only=True)
        assert ended["global_step"] == whole[job]["global_step"], job.log
        for key, value in whole[job]["state_dict"].items():
            # The stop is one more moment at which the servers' workers take the mean of their running statistics.
            exact = job is not server or "running" not in key
            error = torch.zeros_like(value) if exact else 1e-6 * (1 + value.abs())
            assert ((ended["state_dict"][key] - value).abs() <= error).all(), f"{key}\n{job.log}"


def _uninterrupted(run_cli, *args):
    folder = Path("whole")
    where = [f"--checkpoint.dirpath={folder}", "--trainer.enable_progress_bar=false"]
    code, output = run_cli("fit", *args, *RUN, *where, "--trainer.enable_model_summary=false")
    assert code == 0, output
    return torch.load(folder / "last.ckpt", weights_only=True)


def test_a_job_that_is_warned_while_it_starts_is_requeued(slurm, run_cli):
    """The processes are still importing, so the signal ends them; there is nothing to save."""
    job = Job(slurm, run_cli, QUICKSTART)
    # SLURM calls a step running before its programs are there, and a signal at that moment reaches none.
    job.wait_for(lambda: all(_ranks(job.number, number) for number in (0, 1)), "the programs")
    job.warn()
    job.wait_until_requeued()
    assert not job.last.exists()
    slurm.run("scancel", job.number)


@pytest.mark.xdist_group("parts")
def test_dedicated_servers_run_on_nodes_of_their_own_and_a_dead_worker_is_left_out(slurm, run_cli):
    """A heterogeneous job: the second node holds the parameters, the workers are on the first one."""
    KeyPair.create().save("run.key")
    few = ("--trainer.num_nodes=1", "--trainer.devices=2", "--trainer.max_epochs=30", "--trainer.limit_train_batches=5")
    job = Job(slurm, run_cli, *PARAMETER_SERVER, f"{SERVER}.timeout=15", *few, "--cluster.server_nodes=1")
    job.wait_for(job.last.exists, "a checkpoint")
    assert [slurm.job(f"{job.number}+{part}")["NodeList"] for part in (0, 1)] == ["n1", "n2"]
    os.kill(_rank(job.number, 1), signal.SIGKILL)
    job.wait_for(lambda: job.state["JobState"] not in RUNS, "the job's end")
    assert torch.load(job.last, weights_only=True)["global_step"] == 150, job.log
    # It counts as failed, since a process of it has; it is not requeued.
    assert (job.state["JobState"], job.state["ExitCode"], job.state["Restarts"]) == ("FAILED", "137:0", "0")


def _rank(job, number):
    """The process of a rank."""
    ranks = _ranks(job, number)
    assert ranks, f"no rank {number} of job {job}"
    return ranks[0]


def _ranks(job, number):
    """The processes of a rank."""
    found = []
    wanted = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={number}".encode()}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
    return found


def test_the_doctor_examines_the_nodes(slurm, tmp_path):
    variables = {**slurm.environment, "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "cnnstrategies", "doctor"]
    doctor = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=120)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert f"All 2 hosts agree, reach each other and share {tmp_path}" in doctor.stdout


@pytest.mark.xdist_group("parts")
def test_an_array_joins_a_run_whose_tasks_leave_when_they_are_told(slurm):
    """The script of the docs, a task of one node each: one is told to leave, as before a pre-emption; one stays."""
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs/spot.md").read_text(), re.DOTALL)[1]
    changes = {
        "--array=1-16": f"--array=1-{len(NODES)}",
        "--partition=preempt": "--partition=low",
        "--run tcp://10.0.0.1:7000 --key_file run.key": "--run runs/digits_elastic",  # Storage that all nodes see.
    }
    for old, new in changes.items():
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    Path("array.sh").write_text(script)
    config = (ROOT / "configs/experiments/digits_smallcnn_elastic_cpu.yaml").read_text()
    Path("run.yaml").write_text(config)
    Path("bin").mkdir()
    Path("bin/cnnstrategies").write_text(f'#!/bin/bash\nexec {sys.executable} {ROOT}/cli.py "$@"\n')
    Path("bin/cnnstrategies").chmod(0o755)
    path = f"{os.getcwd()}/bin:{slurm.environment['PATH']}"
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["fit", "--config", "run.yaml", "--trainer.max_epochs=100000", "--trainer.enable_progress_bar=false"]
    with Path("fit.log").open("w") as log:
        run = subprocess.Popen([sys.executable, str(ROOT / "cli.py"), *words], env=own, stdout=log, stderr=log)

    wait = partial(wait_for, slurm)
    seen = set()

    def joined():
        """How many others have been seen in the run: an epoch is short, and between two of them they are out."""
        address = RunAddress.find("runs/digits_elastic")
        keys = None if address.key_file is None else KeyPair.load(address.key_file)
        with Watcher(address.coordinator, keys) as watcher:
            answer = watcher.ask(2.0)
        members = [] if answer is None else answer.fields["members"]
        seen.update(one["process"] for one in members if one["role"] == "worker" and one["id"] and one["takes_part"])
        return len(seen)

    try:
        wait(lambda: list(Path("runs").glob("digits_elastic/*/watch.json")), "the run's begin")
        export = f"--export=ALL,PATH={path},PYTHONPATH={ROOT},OMP_NUM_THREADS=1"
        job = slurm.run("sbatch", "--parsable", "--output=task-%a.log", "--time=30", export, "array.sh").strip()
        wait(lambda: joined() == len(NODES), "all tasks in the run")
        slurm.run("scancel", "--signal=TERM", f"{job}_1")
        wait(lambda: "it was told to leave" in Path("task-1.log").read_text(), "one that leaves")
        seen.clear()
        wait(lambda: joined() == 1, "the other goes on")
    finally:
        run.send_signal(signal.SIGTERM)
        run.wait(60)
    wait(lambda: not slurm.run("squeue", "-h", f"--jobs={job}", check=False).strip(), "the array's end")
    assert "Joined the run" in Path("task-2.log").read_text()


def test_slurm_is_asked_before_the_job_is_queued(slurm, run_cli):
    """More nodes than there are: SLURM's own answer, in one line, and nothing is left behind."""
    os.environ |= slurm.environment
    code, output = run_cli("submit", "fit", QUICKSTART, "--trainer.num_nodes=4", "--trainer.devices=1")
    assert code == 2
    line = output.splitlines()[-1]
    assert line.startswith("cnnstrategies: error: SLURM refuses the job: ")
    assert "node" in line.lower()
    assert not list(Path("slurm").iterdir())
    assert not slurm.run("squeue", "-h").strip()
