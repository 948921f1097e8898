"""A SLURM job: its size, which the trainer decides, its sbatch script, and how that is handed over."""

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError

# After the first rank has ended, the others have this long; without a limit where they may go on alone.
WAIT_SECONDS, UNLIMITED = 60, 0
STRATEGY = "cnnstrategies.strategies.ParameterServerStrategy"


@dataclass(frozen=True)
class Size:
    """How many processes and GPUs a job has: ``trainer.num_nodes``, ``trainer.devices``; no GPUs on CPUs."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int

    @property
    def tasks(self) -> int:
        """Processes of the job."""
        return self.nodes * self.tasks_per_node


def job_size(num_nodes: int, devices: Any, accelerator: Any) -> Size:
    """The size of the job that a trainer's arguments describe."""
    count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else 0
    if count < 1:
        raise ConfigurationError(
            f"trainer.devices={devices}: a job asks for their number before it has a machine, for example "
            "--trainer.devices 4"
        )
    if accelerator not in ("cpu", "gpu", "cuda"):
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: a job asks for GPUs or not before it has a machine: set cpu or gpu"
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
    """The script of a job, for ``sbatch``.

    Args:
        folder: The run folder, with ``config.yaml``.
        python: The interpreter, unless the options name one.
        command: The command line that made the job, for the reader.
        goes_on: Whether the run goes on without a rank that dies.
    """
    parts = [_header(options, size, folder, command), setup_lines(options)]
    interpreter = interpreter_words(options, python)
    # Since 22.05 srun does not take over sbatch's CPUs per task.
    cpus = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    # A rank that fails alone must not leave the others waiting. Not --kill-on-bad-exit: its SIGTERM reaches ranks that
    # end in order after a warning, and srun's status, the highest of all ranks', would not tell of the warning.
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
        # Not per task: each process would see one GPU, as number 0, and take it for another's.
        "--gpus-per-node": gpus if size.gpus_per_node else None,
        "--cpus-per-task": options.cpus_per_task,
        "--mem": options.memory,
        "--time": options.time,
        "--output": str(folder).replace("%", "%%") + "/%j.log",
        "--open-mode": "append",
        "--signal": f"{options.signal}@{options.warning}" if options.requeue else None,
    }
    given = [f"#SBATCH {name}={shlex.quote(str(value))}" for name, value in lines.items() if value is not None]
    given.append("#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue")
    given += [f"#SBATCH {line}" for line in options.sbatch]
    if options.server_nodes:
        same = {name: lines[name] for name in ("--partition", "--account", "--time")}
        second = {"--nodes": options.server_nodes, "--ntasks-per-node": 1, **same}
        given.append("#SBATCH hetjob")
        given += [f"#SBATCH {name}={shlex.quote(str(value))}" for name, value in second.items() if value is not None]
        given += [f"#SBATCH {line}" for line in options.server_sbatch]
    return "\n".join(["#!/bin/bash", f"# Written by: {command}", *given]) + "\n"


def setup_lines(options: ClusterOptions) -> str:
    """The lines of a script before the run: threads, the user's own, and the environment."""
    lines = list(options.setup)
    if options.cpus_per_task is not None:
        lines.insert(0, f"export OMP_NUM_THREADS={options.cpus_per_task}")
    if options.venv is not None:  # After a module that may have an interpreter of its own.
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
    """Start a parameter server on each node of the second part; which nodes these are, is known only now."""
    # Ports as Lightning chooses them, by the job's number; those of the servers lie above.
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
    # SLURM requeues a pre-empted job by itself only if it is still there when the partition's grace time ends.
    return f"""# Ended by the warning (after a step with a checkpoint, or while it was starting), or by a pre-emption:
warned=$((128 + $(kill -l {options.signal})))
if [[ $status -eq $warned ]] || [[ $status -ne 0 && $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[0-9] ]]; then
    if [[ ${{SLURM_RESTART_COUNT:-0}} -lt {options.max_requeues} ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
"""


def submit(script: Path) -> str:
    """Check a script with SLURM and put it into the queue; the job's number."""
    if shutil.which("sbatch") is None:
        raise ConfigurationError(
            "sbatch is not found: submit on a login node of a SLURM cluster; --dry_run prints the script anywhere"
        )
    # A job that no set of nodes can run would be accepted and wait forever, where the cluster does not enforce limits.
    _sbatch("--test-only", str(script))
    return _sbatch("--parsable", str(script)).strip().partition(";")[0]


def _sbatch(*arguments: str) -> str:
    ended = subprocess.run(["sbatch", *arguments], capture_output=True, text=True)
    if ended.returncode != 0:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise ConfigurationError(f"SLURM refuses the job: {said}; change the cluster section, or the trainer's devices")
    return ended.stdout
