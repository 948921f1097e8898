"""Jobs that `submit` queues on a real SLURM cluster of two nodes, which these tests start."""

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from cnnstrategies.paramserver.security import KeyPair
from tests.cluster.exceptions import KILLED, Failing, failing_runs, several_runs
from tests.cluster.processes_of import PYTHON, fit, process_with, wait_until
from tests.cluster.slurm_cluster import CPUS, Slurm, missing, slurm_cluster
from tests.conftest import ROOT
from tests.runner.ports import free_port
from tests.strategies.fault_injection import PAUSES, fault_arguments

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
# The tests of a group share a cluster. There are two groups, because these tests wait often and take longest.
submitted, stepped = pytest.mark.xdist_group("slurm jobs"), pytest.mark.xdist_group("slurm steps")

TWO_NODES = f"""
trainer: {{num_nodes: 2, devices: 1, enable_progress_bar: false, enable_model_summary: false}}
cluster:
  partition: low
  time: "30"
  # The two nodes are on one machine, and their names cannot be resolved.
  setup: [export MASTER_ADDR=127.0.0.1, "export PYTHONPATH={ROOT}", export OMP_NUM_THREADS=1]
"""
# Mixing is on: a resumed run must draw what the uninterrupted one draws.
RUN = [
    *("--model.init_args.mixup_alpha=0.2", "--trainer.max_epochs=20"),
    *("--trainer.limit_train_batches=5", "--trainer.limit_val_batches=1"),
]
HYBRID = "--config=" + str(ROOT / "configs/experiments/digits_smallcnn_hybrid_1-1_cpu.yaml")
QUICKSTART = "--config=" + str(ROOT / "configs/quickstart.yaml")
SERVER = "--trainer.strategy.init_args"
PARAMETER_SERVER = (QUICKSTART, "--trainer.strategy=ParameterServerStrategy", f"{SERVER}.key_file=run.key")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_cluster() as running:
        yield running


class Job:
    """A job that `cnnstrategies submit fit` has queued."""

    def __init__(self, slurm: Slurm, run_cli: Callable[..., tuple[int, str]], config: str, *args: str) -> None:
        Path("two_nodes.yaml").write_text(TWO_NODES)
        os.environ |= slurm.environment
        code, output = run_cli("submit", "fit", config, "--config=two_nodes.yaml", *args)
        assert code == 0, output
        self.slurm = slurm
        self.number = re.search(r"Submitted job (\d+): ", output)[1]
        self.folder = Path(re.search(r"Logs, checkpoints and script: (\S+) ", output)[1])
        self.last = self.folder / "checkpoints/last.ckpt"

    @property
    def state(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    @property
    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def report(self) -> str:
        return f"{self.state}\n{self.log}\n{self.slurm.logs()}"

    def wait_for(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self.report)

    def wait_for_the_end(self) -> None:
        self.slurm.wait_for_the_end(self.number, self.report)


@submitted
def test_an_interrupted_job_goes_on_exactly(slurm, run_cli):
    """The job on 2 nodes is first warned of its end, and later pre-empted; its weights equal an uninterrupted run's.

    After each step the job pauses, so that SLURM's signals arrive long before its end.
    """
    job = Job(slurm, run_cli, HYBRID, *RUN, PAUSES, f"--cluster.cpus_per_task={CPUS - 2}")
    job.wait_for(job.last.exists)
    # Before the time limit SLURM sends this signal to the processes and not to the script.
    slurm.run("scancel", "--signal=USR1", job.number)
    job.wait_for(lambda: "Restored all states" in job.log)
    # A job with a higher priority pre-empts this job: SLURM sends SIGTERM.
    slurm.run("sbatch", "--partition=high", "--nodes=2", "--ntasks-per-node=3", "--output=/dev/null", "--wrap=true")
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    alone = ["--trainer.strategy.init_args.start_method=fork", "--checkpoint.dirpath=whole"]
    code, output = run_cli("fit", HYBRID, *RUN, *quiet, *alone)
    assert code == 0, output
    job.wait_for_the_end()
    assert (job.state["JobState"], job.state["Restarts"]) == ("COMPLETED", "2"), f"{job.state}\n{job.log}"
    for name in ("SIGUSR1", "SIGTERM"):
        assert job.log.count(f"{name}: stopping after this step") == 1, job.log
        assert job.log.count(f"Stopped by {name} after step") == 1, job.log
    assert "Traceback" not in job.log, job.log
    assert job.log.count("Restored all states") == 2
    whole, ended = (torch.load(file, weights_only=True) for file in ("whole/last.ckpt", job.last))
    assert whole["global_step"] == ended["global_step"] == 100, job.log
    assert all(value.equal(ended["state_dict"][key]) for key, value in whole["state_dict"].items()), job.log


@submitted
def test_dedicated_servers_have_their_own_nodes_and_a_dead_worker_is_left_out(slurm, run_cli):
    """The job is heterogeneous: the servers are on the second node, and the workers on the first node."""
    KeyPair.create().save("run.key")
    few = ("--trainer.num_nodes=1", "--trainer.devices=2", "--trainer.max_epochs=20", "--trainer.limit_train_batches=5")
    job = Job(slurm, run_cli, *PARAMETER_SERVER, f"{SERVER}.timeout=8", *few, "--cluster.server_nodes=1")
    job.wait_for(job.last.exists)
    assert [slurm.job(f"{job.number}+{part}")["NodeList"] for part in (0, 1)] == ["n1", "n2"]
    os.kill(int(process_with(SLURM_JOB_ID=job.number, SLURM_PROCID="1")["PID"]), signal.SIGKILL)
    job.wait_for_the_end()
    assert torch.load(job.last, weights_only=True)["global_step"] == 100, job.log
    # The job counts as failed, because one of its processes has failed; it is not requeued.
    assert (job.state["JobState"], job.state["ExitCode"], job.state["Restarts"]) == ("FAILED", "137:0", "0")


@submitted
def test_a_job_that_slurm_refuses_leaves_nothing_behind(slurm, run_cli):
    """The job asks for more nodes than exist. The error message is SLURM's own, in one line."""
    os.environ |= slurm.environment
    code, output = run_cli("submit", "fit", QUICKSTART, "--trainer.num_nodes=4", "--trainer.devices=1")
    assert code == 2
    line = output.splitlines()[-1]
    assert line.startswith("cnnstrategies: error: SLURM refuses the job (")
    assert "node" in line.lower()
    assert not list(Path("slurm").iterdir())


STEPS = """#!/bin/bash
cd {folder}
export MASTER_ADDR=127.0.0.1 MASTER_PORT={port} PYTHONPATH={path} OMP_NUM_THREADS=1
srun -n2 --exact --output=a.log bash -c 'echo $SLURM_STEP_ID > a.step; exec "$@"' _ {a} &
srun -n2 --exact --output=b.log {b}
echo $? > b.code
scancel --signal=TERM $SLURM_JOB_ID.$(<a.step)
wait $!
echo $? > a.code
"""
FEW = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1", "--data.init_args.num_workers=1")
LONGER = ("--trainer.limit_train_batches=12",)  # Each epoch starts a loader worker and writes a checkpoint.
EXCEPTIONS = (Failing("ddp", None), Failing("parameter_server", 1), Failing("hybrid_pipeline", 1))


class Steps(NamedTuple):
    """Two steps of an ended job, each with two ranks on one node. Each step has trained several times.

    Attributes:
        job: The job's number.
        folder: Folder with the steps' files.
    """

    job: str
    folder: Path

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def codes(self, name: str) -> list[str]:
        return self.read(f"{name}.codes").split()

    def report(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture(scope="module")
def steps(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Run both steps at the same time, because the ranks of each start import everything first.

    Step a trains `first` and `digits`, and then raises exceptions. Step b trains `second` after `first` and, while
    `digits` runs, starts a run with this name. Then SLURM sends SIGTERM to step a, which ends `digits`.
    """
    folder = tmp_path_factory.mktemp("steps")
    first, digits = (str(folder / f"runs/quickstart/{name}/checkpoints/last.ckpt") for name in ("first", "digits"))
    a = several_runs(
        ("first", fit(*FEW, "--run_name=first", "--trainer.max_epochs=2"), []),
        ("digits", fit(*FEW, "--run_name=digits", "--trainer.max_epochs=1000", *LONGER, PAUSES), []),
        ("killed", fit("--trainer.strategy=hybrid_pipeline", "--run_name=killed", *fault_arguments(step=2)), []),
        *failing_runs(*EXCEPTIONS),
    )
    b = several_runs(
        ("second", fit(*FEW, "--run_name=second", "--trainer.max_epochs=3"), [first, str(folder)]),
        ("refused", fit(*FEW, "--run_name=digits"), [digits, digits]),
    )
    programs = {"a": shlex.join([PYTHON, *a]), "b": shlex.join([PYTHON, *b])}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/strategies")))
    (folder / "steps.sh").write_text(STEPS.format(folder=folder, path=path, port=free_port(), **programs))
    options = ("--parsable", "--nodes=1", "--ntasks=4", f"--output={folder}/job.log")
    ended = Steps(slurm.run("sbatch", *options, folder / "steps.sh").strip(), folder)
    slurm.wait_for_the_end(ended.job, ended.report, 220)
    return ended


@stepped
def test_two_steps_of_a_job_on_one_node_train_apart(steps: Steps) -> None:
    """Both steps have one MASTER_PORT. Rank 1 of the second run is there long before its own rank 0.

    Each run has another number of epochs, so that ranks of two runs could not end together.
    """
    for epochs, name in ((2, "first"), (3, "second")):
        assert steps.codes(name) == ["0", "0"], steps.report()
        checkpoint = torch.load(steps.folder / f"runs/quickstart/{name}/checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 3 * epochs, steps.report()


@stepped
def test_a_step_with_the_name_of_a_running_step_is_refused_as_a_whole(steps: Steps) -> None:
    """Rank 0 prints the reason, and rank 1 does not wait for rank 0."""
    # As `srun`, this test takes the largest of the ranks' exit codes.
    assert (max(map(int, steps.codes("digits"))), int(steps.read("b.code"))) == (143, 2), steps.report()
    stopped, refused = steps.read("digits.log"), steps.read("b.log")
    # SLURM sends the signal to the loader workers as well.
    assert stopped.count("SIGTERM: stopping after this step") == stopped.count("Stopped by SIGTERM after step") == 1
    assert "Traceback" not in stopped, stopped
    assert refused.count("error: the run digits is already running: ") == 1, refused
    assert f"SLURM step {steps.job}.{steps.read('a.step').strip()}) since 20" in refused, refused


@stepped
def test_a_killed_rank_of_a_step_is_named_with_its_memory(steps: Steps) -> None:
    """`srun` does not end the other rank, which loses its connection. Each rank has a program as its parent process."""
    assert sorted(map(int, steps.codes("killed"))) == [-9, 1], steps.report()
    log = steps.read("killed.log")
    assert len(re.findall(KILLED.format(2), log)) == log.count("it had held") == 1, log
    assert "Traceback" not in log, log


@stepped
def test_an_exception_ends_all_ranks_of_a_step(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun` does not end the other rank. The last line of the log is the exception's own line."""
    monkeypatch.chdir(steps.folder)
    *before, last = EXCEPTIONS
    last.check(steps.read("a.log"), steps.read("a.code").split())
    for run in before:
        run.check()
