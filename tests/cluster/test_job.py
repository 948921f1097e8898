"""The sbatch script says what the configuration says, and bash accepts it."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from cnnstrategies.cluster.doctor_host import Place, find_place
from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.cluster.job import Size, job_size, sbatch_script
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError

FOLDER = Path("/shared/runs of ann/100%done")


def script(options: ClusterOptions, size: Size) -> str:
    text = sbatch_script(options, size, FOLDER, "/opt/python", "cnnstrategies submit fit --config a.yaml")
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return text


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_every_option_is_in_the_script() -> None:
    options = ClusterOptions(
        job_name="vgg",
        partition="gpu",
        account="biology",
        time="1-12:00:00",
        cpus_per_task=8,
        memory="64G",
        gpu_type="a100",
        constraint="ib&nvme",
        modules=["gcc/13", "cuda/12.4"],
        venv=Path("/home/ann/venv"),
        setup=["export NCCL_SOCKET_IFNAME=ib0"],
        sbatch=["--exclusive"],
        signal="USR2",
        signal_seconds=300,
    )
    text = script(options, Size(nodes=2, tasks_per_node=4, gpus_per_node=4))
    assert directives(text) == [
        "--job-name=vgg",
        "--partition=gpu",
        "--account=biology",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=a100:4",
        "--cpus-per-task=8",
        "--mem=64G",
        "--constraint='ib&nvme'",
        "--time=1-12:00:00",
        "--output='/shared/runs of ann/100%%done/%j.log'",
        "--open-mode=append",
        "--signal=USR2@300",
        "--requeue",
        "--exclusive",
    ]
    setup = (
        "module load gcc/13\nmodule load cuda/12.4\nsource /home/ann/venv/bin/activate\n"
        "export OMP_NUM_THREADS=8\nexport NCCL_SOCKET_IFNAME=ib0\n"
    )
    assert setup in text
    assert "srun --cpus-per-task=8 " in text
    assert "python -m cnnstrategies fit --config" in text
    assert "kill -l USR2" in text
    assert "run='/shared/runs of ann/100%done'\n" in text


def test_what_is_left_out_is_left_to_the_cluster() -> None:
    text = script(ClusterOptions(requeue=False), Size(nodes=1, tasks_per_node=2, gpus_per_node=0))
    assert directives(text) == [
        "--job-name=cnnstrategies",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--output='/shared/runs of ann/100%%done/%j.log'",
        "--open-mode=append",
        "--no-requeue",
    ]
    assert "/opt/python -m cnnstrategies fit" in text
    assert "scontrol" not in text


def test_server_nodes_are_a_second_part_of_the_job() -> None:
    options = ClusterOptions(partition="gpu", time="60", server_nodes=2, server_sbatch=["--partition=cpu"])
    text = script(options, Size(nodes=1, tasks_per_node=4, gpus_per_node=4))
    lines = directives(text)
    second = lines[lines.index("hetjob") + 1 :]
    # Of two options of one name sbatch takes the last.
    assert second == ["--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--time=60", "--partition=cpu"]
    assert text.index("--het-group=1") < text.index("cnnstrategies.commands.server") < text.index("--het-group=0")
    assert text.count('--config "$run/servers.yaml"') == 2


def test_only_a_run_that_survives_a_dead_rank_goes_on() -> None:
    arguments = (ClusterOptions(), Size(1, 2, 0), FOLDER, "python", "command")
    assert "--wait=60 " in sbatch_script(*arguments)
    assert "--wait=0 " in sbatch_script(*arguments, goes_on=True)


def test_a_container_starts_the_interpreter_that_it_has() -> None:
    size = Size(nodes=1, tasks_per_node=2, gpus_per_node=0)
    options = ClusterOptions(container="apptainer exec --nv --bind '/my data' cnn.sif", server_nodes=1)
    text = script(options, size)
    container = "    apptainer exec --nv --bind '/my data' cnn.sif python -m cnnstrategies"
    assert f"{container} fit --config" in text
    assert f"{container}.commands.server --config" in text
    text = script(ClusterOptions(container="srun-enroot", python="/opt/conda/bin/python"), size)
    assert "    srun-enroot /opt/conda/bin/python -m cnnstrategies fit" in text


SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "cnn", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SHELL = {name: SCRIPT[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NTASKS")}


@pytest.mark.parametrize("variables", [SCRIPT, SHELL, {**SHELL, "SLURM_STEP_ID": "4294967290"}])
def test_without_srun_a_run_starts_its_ranks_itself_on_one_node(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [type(one) for one in environment_plugins([])] == [LightningEnvironment]
    with pytest.raises(ConfigurationError, match=r"trainer.num_nodes=2: this job of SLURM has .* write srun before"):
        environment_plugins([], num_nodes=2)
    assert find_place() is None
    monkeypatch.setenv("NODE_RANK", "0")
    assert [type(one) for one in environment_plugins([], num_nodes=2)] == [LightningEnvironment]
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert [type(one) for one in environment_plugins([], num_nodes=2)] == [SLURMEnvironment]
    for name, value in {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    assert find_place() == Place(node=1, nodes=2, local_rank=0, main_address="n1", main_port=15007)


STUBS = {
    "srun": 'exit "$CODE"',
    "scontrol": """case $1 in
show) echo "JobState=COMPLETING PreemptTime=$PREEMPTED" ;;
requeue) echo "$2" >> requeued ;;
esac""",
}


def run_as_job(folder: Path, code: int, restarts: int = 0, preempted: str = "None") -> list[str]:
    """Run a job's script where srun ends with a code; the jobs that it requeues."""
    folder.mkdir(parents=True)
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    text = sbatch_script(ClusterOptions(max_requeues=3), Size(1, 1, 0), folder, "python", "command")
    job = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts), "CODE": str(code), "PREEMPTED": preempted}
    path = f"{folder}:{os.environ['PATH']}"
    ended = subprocess.run(["bash", "-c", text], cwd=folder, env={"PATH": path, **job})
    assert ended.returncode == code
    requeued = folder / "requeued"
    return requeued.read_text().split() if requeued.exists() else []


def test_warned_and_preempted_jobs_are_requeued_and_failed_not(tmp_path: Path) -> None:
    warned = 128 + signal.SIGUSR1
    assert run_as_job(tmp_path / "warned", warned) == ["17"]
    assert run_as_job(tmp_path / "finished", 0) == []
    assert run_as_job(tmp_path / "failed", 1) == []
    assert run_as_job(tmp_path / "preempted", 143, preempted="2030-01-01T00:00:00") == ["17"]
    assert run_as_job(tmp_path / "finished before it was preempted", 0, preempted="2030-01-01T00:00:00") == []
    assert run_as_job(tmp_path / "warned again", warned, restarts=2) == ["17"]
    assert run_as_job(tmp_path / "warned too often", warned, restarts=3) == []


def test_the_size_is_the_trainers_and_what_it_lacks_is_refused() -> None:
    assert job_size(2, "4", "cuda") == job_size(2, 4, "gpu") == Size(2, 4, 4)
    assert job_size(2, [0, 2], "gpu") == Size(2, 2, 2)
    assert job_size(2, 3, "cpu") == Size(2, 3, 0)
    for devices, accelerator in (("auto", "gpu"), (-1, "gpu"), (2, "auto")):
        with pytest.raises(ConfigurationError, match=r"trainer\.(devices|accelerator)=(auto|-1)"):
            job_size(1, devices, accelerator)


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"time": 5400}, "without quotes"),
    ({"signal_seconds": 10}, "at least 30"),
    ({"job_name": "bash"}, "takes for a shell"),
    ({"job_name": "a b"}, "letters, digits"),
    ({"cpus_per_task": 0}, "cpus_per_task=0"),
    ({"sbatch": ["exclusive"]}, "no option of sbatch"),
    ({"sbatch": ["--nodes=3"]}, "trainer.num_nodes decides it"),
    ({"sbatch": ["-N 3"]}, "trainer.num_nodes decides it"),
    ({"sbatch": ["-N2"]}, "trainer.num_nodes decides it"),
    ({"sbatch": ["--exclusive -n8"]}, "trainer.devices decides it"),
    ({"sbatch": ["--gres=gpu:2"]}, "trainer.devices decides it"),
    ({"sbatch": ["--gres gpu:2"]}, "trainer.devices decides it"),
    ({"sbatch": ["--array=0-3"]}, "cluster.folder decides it"),
    ({"server_nodes": 1, "server_sbatch": ["-N3"]}, "cluster.server_sbatch: '-N3' could disagree"),
    ({"python": "apptainer exec a.sif python"}, "container='apptainer exec a.sif' and cluster.python='python'"),
    ({"server_nodes": -1}, "server_nodes=-1"),
    ({"server_sbatch": ["--mem=8G"]}, "does not ask for"),
]


def test_options_that_cannot_be_right_are_refused() -> None:
    for arguments, message in REFUSED:
        with pytest.raises(ConfigurationError, match=message):
            ClusterOptions(**arguments)  # type: ignore[arg-type]
    lines = ["--exclusive", "-p gpu", "--gres=nvme:1", "--gpu-freq=high", "--nodelist=n1", "-w n1", "--mail-type=END"]
    ClusterOptions(sbatch=lines, server_nodes=1, server_sbatch=["--cpus-per-task=8", "--mem=8G"])
