"""The sbatch script contains all options of the configuration, and bash accepts it."""

import os
import signal
import subprocess
from pathlib import Path

from cnnstrategies.cluster.job import Size, job_size, sbatch_script
from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.options import ClusterOptions

FOLDER = Path("/shared/runs of ann/100%done")
SMALL = Size(nodes=1, tasks_per_node=2, gpus_per_node=0)


def script(options: ClusterOptions, size: Size = SMALL, goes_on: bool = False) -> str:
    text = sbatch_script(
        options, size, JobFiles(FOLDER), "/opt/python", "cnnstrategies submit fit --config a.yaml", goes_on
    )
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
        venv=Path("/home/ann/venv"),
        setup=["module load cuda/12.4"],
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
        "--time=1-12:00:00",
        "--output='/shared/runs of ann/100%%done/%j.log'",
        "--open-mode=append",
        "--signal=USR2@300",
        "--requeue",
        "--exclusive",
    ]
    assert "export OMP_NUM_THREADS=8\nmodule load cuda/12.4\nsource /home/ann/venv/bin/activate\n" in text
    assert "srun --cpus-per-task=8 " in text
    assert "--wait=60 " in text
    assert "python -m cnnstrategies fit --config" in text
    assert "kill -l USR2" in text
    assert "run='/shared/runs of ann/100%done'\n" in text


def test_options_that_are_not_set_are_left_to_the_cluster() -> None:
    text = script(ClusterOptions(requeue=False), goes_on=True)
    assert directives(text) == [
        "--job-name=cnnstrategies",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--output='/shared/runs of ann/100%%done/%j.log'",
        "--open-mode=append",
        "--no-requeue",
    ]
    assert "/opt/python -m cnnstrategies fit" in text
    assert "--wait=0 " in text
    assert "scontrol" not in text


def test_server_nodes_are_a_second_part_of_the_job() -> None:
    options = ClusterOptions(partition="gpu", time="60", server_nodes=2, server_sbatch=["--partition=cpu"])
    text = script(options, Size(nodes=1, tasks_per_node=4, gpus_per_node=4))
    lines = directives(text)
    second = lines[lines.index("hetjob") + 1 :]
    # If an option appears twice, sbatch uses its last value.
    assert second == ["--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--time=60", "--partition=cpu"]
    assert text.index("--het-group=1") < text.index("cnnstrategies.commands.server") < text.index("--het-group=0")
    assert text.count('--config "$run/servers-$SLURM_JOB_ID.yaml"') == 2


def test_a_container_starts_its_own_interpreter() -> None:
    text = script(ClusterOptions(container="apptainer exec --nv --bind '/my data' cnn.sif", server_nodes=1))
    container = "    apptainer exec --nv --bind '/my data' cnn.sif python -m cnnstrategies"
    assert f"{container} fit --config" in text
    assert f"{container}.commands.server --config" in text
    text = script(ClusterOptions(container="srun-enroot", python="/opt/conda/bin/python"))
    assert "    srun-enroot /opt/conda/bin/python -m cnnstrategies fit" in text


STUBS = {
    "srun": 'exit "$CODE"',
    "scontrol": """case $1 in
show) echo "JobState=COMPLETING PreemptTime=$PREEMPTED" ;;
requeue) echo "$2" >> requeued ;;
esac""",
}


def is_requeued(folder: Path, code: int, restarts: int = 0, preempted: str = "None") -> bool:
    """Run a job's script with an srun that ends with a code, and return whether the script requeued the job."""
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    text = sbatch_script(ClusterOptions(max_requeues=3), Size(1, 1, 0), JobFiles(folder), "python", "command")
    job = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts), "CODE": str(code), "PREEMPTED": preempted}
    path = f"{folder}:{os.environ['PATH']}"
    ended = subprocess.run(["bash", "-c", text], cwd=folder, env={"PATH": path, **job})
    assert ended.returncode == code
    requeued = folder / "requeued"
    return requeued.exists() and requeued.read_text() == "17\n"


def test_warned_and_preempted_jobs_are_requeued_and_failed_jobs_are_not(tmp_path: Path) -> None:
    warned = 128 + signal.SIGUSR1
    assert is_requeued(tmp_path / "warned", warned)
    assert not is_requeued(tmp_path / "finished", 0)
    assert not is_requeued(tmp_path / "failed", 1)
    assert is_requeued(tmp_path / "preempted", 143, preempted="2030-01-01T00:00:00")
    assert not is_requeued(tmp_path / "finished before it was preempted", 0, preempted="2030-01-01T00:00:00")
    assert is_requeued(tmp_path / "warned again", warned, restarts=2)
    assert not is_requeued(tmp_path / "warned too often", warned, restarts=3)


def test_the_jobs_size_comes_from_the_trainers_options() -> None:
    assert job_size(2, "4", "cuda") == job_size(2, 4, "gpu") == Size(2, 4, 4)
    assert job_size(2, [0, 2], "gpu") == Size(2, 2, 2)
    assert job_size(2, 3, "cpu") == Size(2, 3, 0)
