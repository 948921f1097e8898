"""Computation of a batch job's size from the trainer's arguments, and generation of job scripts."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import LAUNCH

# Values of srun's --wait: seconds after which the other ranks are killed when the first rank has ended; 0 means never.
WAIT_SECONDS, UNLIMITED = 60, 0
# Path of the configuration file that a job script writes, in the syntax of the shell. Each job has its own file.
SERVERS_FILE = "$run/servers-$SLURM_JOB_ID.yaml"
STRATEGY = "cnnstrategies.strategies.ParameterServerStrategy"


@dataclass(frozen=True)
class Size:
    """Number of nodes, processes and GPUs of a job.

    Attributes:
        nodes: Number of nodes (``trainer.num_nodes``).
        tasks_per_node: Number of processes on each node (``trainer.devices``).
        gpus_per_node: Number of GPUs on each node: ``trainer.devices``, or 0 if the trainer uses CPUs.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int

    @property
    def tasks(self) -> int:
        """Number of processes of the job."""
        return self.nodes * self.tasks_per_node


def job_size(num_nodes: int, devices: Any, accelerator: Any) -> Size:
    """Return the size of a job from the trainer's arguments.

    Raises:
        ConfigurationError: The number of devices or the accelerator is not set explicitly, for example "auto".
    """
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    if count < 1:
        raise ConfigurationError(
            f"trainer.devices={devices}: a job must request its devices before it starts: set a number, for example "
            "--trainer.devices 4"
        )
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: a job must request its GPUs before it starts: set cpu or gpu"
        )
    return Size(num_nodes, count, 0 if accelerator == "cpu" else count)


def sbatch_script(
    options: ClusterOptions,
    size: Size,
    files: JobFiles,
    python: str,
    command: str,
    goes_on: bool = False,
) -> str:
    """Return the script of a SLURM job, for ``sbatch``.

    Args:
        options: The section ``cluster`` of the configuration.
        size: Size of the job.
        files: Files of the submission in the run folder.
        python: Python interpreter that is used if the options set no interpreter, virtual environment or container.
        command: The command line of ``submit``, for a comment in the script.
        goes_on: Whether the run can continue after it has lost a rank.
    """
    parts = [_header(options, size, files.folder, command), setup_lines(options)]
    interpreter = interpreter_words(options, python)
    # Since SLURM 22.05, srun ignores the option --cpus-per-task of sbatch, so srun gets the option as well.
    cpus = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    # If one rank fails, --wait kills the other ranks after a time. --kill-on-bad-exit=1 cannot be used: after the
    # warning signal it would send SIGTERM to ranks that are still stopping properly. Their exit code would then be the
    # code of SIGTERM and not of the warning signal, and srun returns the highest exit code of all ranks.
    srun = f"srun{cpus} --kill-on-bad-exit=0 --wait={UNLIMITED if goes_on else WAIT_SECONDS}"
    parts.append(f"run={shlex.quote(str(files.folder))}\n")
    config = f'--config "$run/{files.configuration.name}"'
    if options.server_nodes:
        config += f' --config "{SERVERS_FILE}"'
        parts.append(_servers(interpreter, config))
        srun += " --het-group=0"
    parts.append(
        f"""# Secret by which the run's processes recognise each other.
export {LAUNCH}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
{srun} \\
    {interpreter} -m cnnstrategies fit {config}
status=$?
"""
    )
    if options.server_nodes:
        parts.append("if [[ $status -eq 0 ]]; then wait; fi # The servers end when the run has ended.\n")
    if options.requeue:
        parts.append(_requeue(options))
    parts.append("exit $status\n")
    return "\n".join(part for part in parts if part)


def _header(options: ClusterOptions, size: Size, folder: Path, command: str) -> str:
    gpus = f"{options.gpu_type}:{size.gpus_per_node}" if options.gpu_type else str(size.gpus_per_node)
    lines = {
        "--job-name": options.job_name,
        "--partition": options.partition,
        "--account": options.account,
        "--nodes": size.nodes,
        "--ntasks-per-node": size.tasks_per_node,
        # --gpus-per-task cannot be used: each process would see only one GPU, with the number 0, but Lightning expects
        # all GPUs of the node.
        "--gpus-per-node": gpus if size.gpus_per_node else None,
        "--cpus-per-task": options.cpus_per_task,
        "--mem": options.memory,
        "--time": options.time,
        "--output": str(folder).replace("%", "%%") + "/%j.log",
        "--open-mode": "append",
        "--signal": f"{options.signal}@{options.warning}" if options.requeue else None,
    }
    directives = [f"#SBATCH {name}={shlex.quote(str(value))}" for name, value in lines.items() if value is not None]
    directives.append("#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue")
    directives += [f"#SBATCH {line}" for line in options.sbatch]
    if options.server_nodes:
        shared = {name: lines[name] for name in ("--partition", "--account", "--time")}
        second = {"--nodes": options.server_nodes, "--ntasks-per-node": 1, **shared}
        directives.append("#SBATCH hetjob")
        directives += [
            f"#SBATCH {name}={shlex.quote(str(value))}" for name, value in second.items() if value is not None
        ]
        directives += [f"#SBATCH {line}" for line in options.server_sbatch]
    return "\n".join(["#!/bin/bash", f"# Written by: {command}", *directives]) + "\n"


def setup_lines(options: ClusterOptions) -> str:
    """Return the lines of a job script that set up the environment before the run starts.

    The lines set the number of threads, run the commands of the user's option ``setup``, and activate the virtual
    environment.
    """
    lines = list(options.setup)
    if options.cpus_per_task is not None:
        lines.insert(0, f"export OMP_NUM_THREADS={options.cpus_per_task}")
    # The user's lines may put a different interpreter on the PATH, so the virtual environment is activated after the
    # user's lines.
    if options.venv is not None:
        lines.append(f"source {shlex.quote(str(options.venv / 'bin/activate'))}")
    return "".join(f"{line}\n" for line in lines)


def interpreter_words(options: ClusterOptions, python: str) -> str:
    """Return the shell command that starts the Python interpreter, inside the container if one is set.

    Args:
        options: The section ``cluster`` of the configuration.
        python: Python interpreter that is used if the options set no interpreter, virtual environment or container.
    """
    interpreter = options.python or ("python" if options.venv or options.container else python)
    return shlex.join([*shlex.split(options.container or ""), interpreter])


def _servers(interpreter: str, config: str) -> str:
    """Return the lines of a job script that start a parameter server on each of the job's server nodes.

    These nodes are the second component of a heterogeneous job. Their names are known only when the job runs, so the
    script writes the names to a configuration file.
    """
    # Lightning computes the main port with the same formula, from 15000 to 24999. The servers' port is above 24999.
    return f"""# Dedicated parameter servers, one on each node of the second job component.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
port=$((25000 + SLURM_JOB_ID % 7000))
cat > "{SERVERS_FILE}" <<END
trainer:
  strategy:
    class_path: {STRATEGY}
    init_args:
      coordinator: tcp://${{MASTER_ADDR:-$first}}:${{MASTER_PORT:-$((15000 + SLURM_JOB_ID % 10000))}}
      endpoints:
$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1" | sed "s|.*|      - tcp://&:$port|")
END
srun --kill-on-bad-exit=0 --het-group=1 \\
    {interpreter} -m cnnstrategies.commands.server {config} &
"""


def _requeue(options: ClusterOptions) -> str:
    # SLURM itself requeues a pre-empted job only if the job is still running at the end of the partition's grace time.
    # A run that has saved a checkpoint ends earlier, so the script requeues the job.
    return f"""# Requeue the job if it was ended by the warning signal or by a pre-emption.
warned=$((128 + $(kill -l {options.signal})))
if [[ $status -eq $warned ]] || [[ $status -ne 0 && $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    if [[ ${{SLURM_RESTART_COUNT:-0}} -lt {options.max_requeues} ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""
