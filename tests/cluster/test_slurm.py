"""Jobs that `submit` queues on a real SLURM cluster of two nodes, which these tests start."""

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cluster.exceptions import Failing, several_runs
from cluster.processes_of import PYTHON, fit, process_with, wait_until
from conftest import ROOT
from fault_injection import PAUSES
from ports import free_port
from slurm_cluster import CPUS, Slurm, missing, slurm_cluster

from cnnstrategies.paramserver.security import KeyPair

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
    *("--model.init_args.mixup_alpha=0.2", "--trainer.max_epochs=48"),
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
    """The job on 2 nodes is first warned of its end, and later pre-empted; its weights equal an uninterrupted run's."""
    job = Job(slurm, run_cli, HYBRID, *RUN, f"--cluster.cpus_per_task={CPUS - 2}")
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
    assert whole["global_step"] == ended["global_step"] == 240, job.log
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
export MASTER_ADDR=127.0.0.1 PYTHONPATH={root} OMP_NUM_THREADS=1
step() {{ # $1: name of the run, $2: number of epochs, $3: file for which rank 0 of the run waits
    srun -n2 --exact --output=$1.log bash -c '
        while [[ $SLURM_PROCID = 0 && -n $3 && ! -e $3 ]]; do sleep 0.1; done
        exec {fit} --run_name=$1 --trainer.max_epochs=$2' _ "$@"
    echo $? > $1.code
}}
export MASTER_PORT={port}
step second 3 runs/quickstart/first/checkpoints/last.ckpt &
step first 2 &
wait
"""


@stepped
def test_two_steps_of_a_job_on_one_node_train_apart(slurm: Slurm, tmp_path: Path) -> None:
    """Both steps have one MASTER_PORT. Rank 1 of the second step is there long before its own rank 0.

    Each run has another number of epochs, so that ranks of two runs could not end together.
    """
    few = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1")
    script = STEPS.format(folder=tmp_path, root=ROOT, port=free_port(), fit=shlex.join([PYTHON, *fit(*few)]))
    (tmp_path / "steps.sh").write_text(script)
    job = slurm.run(
        "sbatch", "--parsable", "--nodes=1", "--ntasks=4", f"--output={tmp_path}/job.log", "steps.sh"
    ).strip()
    logs = lambda: "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(tmp_path.glob("*.log")))  # noqa: E731
    slurm.wait_for_the_end(job, logs, 240)
    for epochs, name in ((2, "first"), (3, "second")):
        assert (tmp_path / f"{name}.code").read_text().strip() == "0", logs()
        checkpoint = torch.load(tmp_path / f"runs/quickstart/{name}/checkpoints/last.ckpt", weights_only=True)
        assert checkpoint["global_step"] == 3 * epochs, logs()


ONE_NAME = """#!/bin/bash
cd {folder}
export PYTHONPATH={root}:{root}/tests/strategies OMP_NUM_THREADS=1
srun -n2 --exact --output=first.log {fit} --run_name=digits --trainer.max_epochs=1000 {pauses} &
while [[ ! -e runs/quickstart/digits/checkpoints/last.ckpt ]]; do sleep 0.1; done
srun -n2 --exact --output=second.log {fit} --run_name=digits
echo $? > second.code
scancel --signal=TERM $SLURM_JOB_ID.0
wait $!
echo $? > first.code
"""


@stepped
def test_a_step_with_the_name_of_a_running_step_is_refused_as_a_whole(slurm: Slurm, tmp_path: Path) -> None:
    """Rank 0 prints the reason, and rank 1 does not wait for rank 0."""
    few = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1", "--data.init_args.num_workers=1")
    script = ONE_NAME.format(folder=tmp_path, root=ROOT, pauses=PAUSES, fit=shlex.join([PYTHON, *fit(*few)]))
    (tmp_path / "steps.sh").write_text(script)
    options = ("--parsable", "--nodes=1", "--ntasks=4", f"--output={tmp_path}/job.log")
    job = slurm.run("sbatch", *options, "steps.sh").strip()
    logs = lambda: "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(tmp_path.glob("*.log")))  # noqa: E731
    slurm.wait_for_the_end(job, logs, 240)
    codes = {name: (tmp_path / f"{name}.code").read_text().strip() for name in ("first", "second")}
    assert codes == {"first": "143", "second": "2"}, logs()
    stopped, refused = ((tmp_path / f"{name}.log").read_text() for name in ("first", "second"))
    # SLURM sends the signal to the loader workers as well.
    assert stopped.count("SIGTERM: stopping after this step") == stopped.count("Stopped by SIGTERM after step") == 1
    assert "Traceback" not in stopped, stopped
    assert refused.count("error: the run digits is already running: ") == 1, refused
    assert f"SLURM step {job}.0) since 20" in refused, refused


EXCEPTIONS = """#!/bin/bash
cd {folder}
export PYTHONPATH={root}:{root}/tests:{root}/tests/strategies OMP_NUM_THREADS=1
srun -n2 --exact --output=step.log {program}
echo $? > step.code
"""


@stepped
def test_an_exception_ends_all_ranks_of_a_step(slurm: Slurm, tmp_path: Path) -> None:
    """`srun` does not end the other rank. The last line of the log is the exception's own line."""
    *before, last = [Failing("ddp", None), Failing("parameter_server", 1), Failing("hybrid_pipeline", 1)]
    program = shlex.join([PYTHON, *several_runs(*before, last)])
    (tmp_path / "steps.sh").write_text(EXCEPTIONS.format(folder=tmp_path, root=ROOT, program=program))
    options = ("--parsable", "--nodes=1", "--ntasks=2", f"--output={tmp_path}/job.log")
    job = slurm.run("sbatch", *options, "steps.sh").strip()
    logs = lambda: "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(tmp_path.glob("*.log")))  # noqa: E731
    slurm.wait_for_the_end(job, logs, 240)
    last.check((tmp_path / "step.log").read_text(), (tmp_path / "step.code").read_text().split())
    for run in before:
        run.check()
