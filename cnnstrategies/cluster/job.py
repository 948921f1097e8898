"""The size of a job, which the trainer decides, and the parts of a job's script, with sbatch's for SLURM."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError

# Seconds that srun gives the other ranks after the first rank has ended. Ranks that can continue alone have no limit.
WAIT_SECONDS, UNLIMITED = 60, 0
STRATEGY = "cnnstrategies.strategies.ParameterServerStrategy"


@dataclass(frozen=True)
class Size:
    """Number of nodes, processes and GPUs of a job.

    Attributes:
        nodes: ``trainer.num_nodes``.
        tasks_per_node: ``trainer.devices``.
        gpus_per_node: ``trainer.devices``, or 0 if the trainer uses CPUs.
    """

    nodes: int
    tasks_per_node: int
    gpus_per_node: int

    @property
    def tasks(self) -> int:
        """Number of processes of the job."""
        return self.nodes * self.tasks_per_node


def job_size(num_nodes: int, devices: Any, accelerator: Any) -> Size:
    """Return the size of the job that a trainer's arguments describe.

    Raises:
        ConfigurationError: The number of devices or the accelerator is left to the machine.
    """
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    if count < 1:
        raise ConfigurationError(
            f"trainer.devices={devices}: a job requests a number of devices before it has a machine: set a number, as "
            "in --trainer.devices 4"
        )
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: a job requests GPUs or not before it has a machine: set cpu or gpu"
        )
    return Size(num_nodes, count, 0 if accelerator == "cpu" else count)


def sbatch_script(
    options: ClusterOptions,
    size: Size,
    folder: Path,
    python: str,
    command: str,
    goes_on: bool = False,
) -> str:
    """Return the script of a job, for ``sbatch``.

    Args:
        options: The section ``cluster``.
        size: The job's size.
        folder: The run folder, with ``config.yaml``.
        python: The interpreter, unless the options name an interpreter or an environment.
        command: The command line that made the job, for people who read the script.
        goes_on: Whether the run continues without a rank that dies.
    """
    parts = [_header(options, size, folder, command), setup_lines(options)]
    interpreter = interpreter_words(options, python)
    # Since 22.05 srun does not inherit sbatch's CPUs per task.
    cpus = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    # --wait ends the other ranks if a rank fails alone. --kill-on-bad-exit would not do: its SIGTERM would also reach
    # ranks that end in order after a warning, and srun's status, the highest of all ranks', would hide the warning.
    srun = f"srun{cpus} --kill-on-bad-exit=0 --wait={UNLIMITED if goes_on else WAIT_SECONDS}"
    parts.append(f"run={shlex.quote(str(folder))}\n")
    config = '--config "$run/config.yaml"'
    if options.server_nodes:
        config += ' --config "$run/servers.yaml"'
        parts.append(_servers(interpreter, config))
        srun += " --het-group=0"
    parts.append(
        f"""{srun} \\
    {interpreter} -m cnnstrategies fit {config}
status=$?
"""
    )
    if options.server_nodes:
        parts.append("if [[ $status -eq 0 ]]; then wait; fi # The servers end with the run.\n")
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
        # Not per task: each process would then see one GPU with number 0, and mistake it for another process's GPU.
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
    """Return the lines of a script before the run: the number of threads, the user's lines, and the environment."""
    lines = list(options.setup)
    if options.cpus_per_task is not None:
        lines.insert(0, f"export OMP_NUM_THREADS={options.cpus_per_task}")
    if options.venv is not None:  # After the user's lines, which may load a module with another interpreter.
        lines.append(f"source {shlex.quote(str(options.venv / 'bin/activate'))}")
    return "".join(f"{line}\n" for line in lines)


def interpreter_words(options: ClusterOptions, python: str) -> str:
    """Return the words that start the interpreter of a script, inside the container if there is one.

    Args:
        options: The section ``cluster``.
        python: The interpreter, if `options` names neither an interpreter nor an environment that has one.
    """
    interpreter = options.python or ("python" if options.venv or options.container else python)
    return shlex.join([*shlex.split(options.container or ""), interpreter])


def _servers(interpreter: str, config: str) -> str:
    """Return lines that start a parameter server on each node of the job's second part.

    The script writes the nodes' names to a configuration, because they are known only when the job runs.
    """
    # Lightning derives the main port from the job's number in this way; the servers' ports are above Lightning's.
    return f"""# Dedicated parameter servers, one on each node of the job's second part.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
port=$((25000 + SLURM_JOB_ID % 7000))
cat > "$run/servers.yaml" <<END
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
    # SLURM itself requeues a pre-empted job only if the job still runs when the partition's grace time ends.
    return f"""# Ended by the warning (after a step with a checkpoint, or while it was starting), or by a pre-emption:
warned=$((128 + $(kill -l {options.signal})))
if [[ $status -eq $warned ]] || [[ $status -ne 0 && $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    if [[ ${{SLURM_RESTART_COUNT:-0}} -lt {options.max_requeues} ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""
