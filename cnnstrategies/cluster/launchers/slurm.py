"""Launcher for SLURM. ``submit`` writes a job script for sbatch, and srun starts the ranks."""

import os
import re
import sys
from dataclasses import fields
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.job import sbatch_script
from cnnstrategies.cluster.launchers.jobs import ScriptJob, hand_over
from cnnstrategies.cluster.launchers.launcher import Environ, Launcher, Restart
from cnnstrategies.cluster.launchers.registry import local_rank, register
from cnnstrategies.cluster.options import INTERACTIVE, ClusterOptions
from cnnstrategies.errors import ConfigurationError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from cnnstrategies.cluster.submission import Submission

# The lowest of the step ids that SLURM reserves for steps that srun has not started, such as the job script and the
# interactive shell.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@register
class Slurm(Launcher):
    """Launcher for SLURM. The tasks of srun are the ranks.

    In a job script without srun there is only one process, which also has the job's environment variables.
    """

    name = "slurm"
    title = "SLURM"
    precedence = 60
    program = "srun"
    rank_variable, size_variable = "SLURM_PROCID", "SLURM_NTASKS"
    local_rank_variable = "SLURM_LOCALID"
    variables = ("SLURM_*",)
    reads = frozenset(field.name for field in fields(ClusterOptions))
    lightning_knows = True

    @override
    def detect(self, environ: Environ) -> bool:
        return "SLURM_JOB_ID" in environ

    @override
    def starts_ranks(self, environ: Environ) -> bool:
        step = int(environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP))
        return step < FIRST_SPECIAL_STEP and _has_tasks(environ)

    @override
    def environment(self) -> "ClusterEnvironment":
        """Return Lightning's cluster environment for SLURM, with ``auto_requeue`` turned off.

        With ``auto_requeue``, Lightning would save a checkpoint in the handler of the warning signal, when the ranks
        may be in different steps. Instead, the callback GracefulStop stops all ranks after the same step, and the job
        script requeues the job.

        Lightning reads the number of tasks on each node from ``SLURM_NTASKS_PER_NODE``, which exists only if the job or
        the step has the option ``--ntasks-per-node``. A step may also have another number of tasks than its job. The
        variable is therefore set to the number of tasks that SLURM has started.

        Raises:
            ConfigurationError: The nodes have different numbers of tasks.
        """
        from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

        if (tasks := tasks_per_node(os.environ)) is not None:
            os.environ["SLURM_NTASKS_PER_NODE"] = str(tasks)
        return SLURMEnvironment(auto_requeue=False)

    @override
    def script_environment(self, environ: Environ, num_nodes: int) -> "ClusterEnvironment | None":
        """Return Lightning's cluster environment for runs without a launcher.

        In a job script without srun, Lightning itself would choose its SLURM environment because of the job's
        environment variables, and this process would wait as rank 0 for the other ranks.
        """
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning_utilities.core.rank_zero import rank_zero_info

        if num_nodes > 1 and "NODE_RANK" not in environ:
            raise ConfigurationError(
                f"trainer.num_nodes={num_nodes}, but this SLURM job has started only one process, on its first node: "
                "start the command in the job script with srun, with one task for each device (--ntasks-per-node), or "
                "let `cnnstrategies submit fit` write the script"
            )
        nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
        if nodes > 1 and local_rank(environ) == 0:
            rank_zero_info(
                f"This SLURM job has {nodes} nodes, but the run uses only this node: start the run with srun, one task "
                "for each device, or with cnnstrategies submit on a login node"
            )
        return LightningEnvironment() if _has_tasks(environ) else None

    @override
    def nodes(self, environ: Environ) -> int:
        return int(environ["SLURM_NNODES"])

    @override
    def launch_id(self, environ: Environ) -> str | None:
        step = ".".join(environ[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environ)
        # A requeued job has the same job id, and its steps have the same numbers again.
        restarts = environ.get("SLURM_RESTART_COUNT", "0")
        return f"step {step}" + (f" after {restarts} requeues" if restarts != "0" else "")

    @override
    def start_command(self, nodes: int, devices: int) -> str:
        return f"srun --nodes={nodes} --ntasks-per-node={devices}"

    @override
    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a name from the job id and the step id, which stay the same when the job is requeued.

        A job script without srun may train several configurations, so the name has the hash of the configuration
        instead of a step id. Runs in an interactive shell do not get a name, because SLURM does not restart them.
        """
        interactive = "SLURM_PTY_PORT" in environ or environ.get("SLURM_JOB_NAME") in INTERACTIVE
        if interactive or "SLURM_TASK_PID" not in environ:
            return None
        return f"slurm_{environ['SLURM_JOB_ID']}_{environ.get('SLURM_STEP_ID', configuration)}"

    @override
    def restart(self, options: ClusterOptions) -> Restart | None:
        return Restart("a requeued job", "set cluster.requeue to false") if options.requeue else None

    @override
    def job(self, submission: "Submission", command: str) -> ScriptJob:
        options = submission.options
        files = submission.job_files(submission.parent_folder(self))
        submission.prepare_data()
        goes_on = submission.server_options is not None
        script = sbatch_script(options, submission.size, files, sys.executable, command, goes_on)
        warning = {"stop.warning_signal": options.signal, "stop.warning_grace": float(options.grace)}
        return ScriptJob(submission, files, script, queue, warning if options.requeue else {})


def tasks_per_node(environ: Environ) -> int | None:
    """Return the number of tasks that SLURM has started on each node of this step. Return None if it is not known.

    Raises:
        ConfigurationError: The nodes have different numbers of tasks.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return None
    # SLURM writes 2(x3),1 for three nodes with 2 tasks each, and a node with 1 task.
    counts = {re.sub(r"\(x\d+\)$", "", part) for part in text.split(",")}
    if len(counts) > 1 or not min(counts).isdigit():
        raise ConfigurationError(
            f"SLURM has started different numbers of tasks on the nodes (tasks per node: {text}): start the run with "
            "srun --ntasks-per-node, so that each node has one task for each device"
        )
    return int(min(counts))


def queue(script: Path) -> str:
    """Submit a job script with sbatch, and return the job id."""
    # A SLURM cluster that does not enforce limits accepts a job that can never run. --test-only refuses such a job.
    hand_over(Slurm.title, "sbatch", "--test-only", str(script))
    return hand_over(Slurm.title, "sbatch", "--parsable", str(script)).strip().partition(";")[0]


def _has_tasks(environ: Environ) -> bool:
    """Whether Lightning would consider this process to be a SLURM task.

    Lightning's own function is not called, because it also warns if srun is installed but not used.
    """
    return "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in INTERACTIVE
