"""What the launcher says about this process, where Lightning needs to be told."""

import os
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from cnnstrategies.cluster.mpirun import MPIRUNS
from cnnstrategies.errors import ConfigurationError

# srun's own after those of an mpirun inside its job: SLURM has started one process there, which is its number 0.
LOCAL_RANKS = ("LOCAL_RANK", *(kind.LOCAL_RANK for kind in MPIRUNS), "SLURM_LOCALID")

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on SLURM numbers what srun has not started: a job's script, its shell.


def local_rank() -> int:
    """Number of this process on its machine, known before Lightning has found its environment; 0 without a launcher."""
    return next((int(os.environ[name]) for name in LOCAL_RANKS if name in os.environ), 0)


def environment_plugins(plugins: list[Any], num_nodes: int = 1) -> list[ClusterEnvironment]:
    """What to add to ``trainer.plugins`` for the launcher that started this process.

    mpirun inside a SLURM job comes first: its ranks are those that count. Under srun Lightning would save its
    checkpoint inside the handler of the warning signal, when the ranks may be in different steps; here GracefulStop
    stops them at the same one, and the job's script requeues it. A job's script, or its shell, without srun is one
    process that has the job's variables: Lightning would take it for rank 0 and wait for the others.

    Args:
        plugins: Those of the configuration; a cluster environment among them is left alone.
        num_nodes: ``trainer.num_nodes``.

    Raises:
        ConfigurationError: A run on several nodes was started in a job of SLURM without srun.
    """
    if any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return []
    if (launcher := _launcher()) is not None:
        return [] if isinstance(launcher, TorchElasticEnvironment) else [launcher]  # Lightning finds torchrun itself.
    if num_nodes > 1 and "SLURM_JOB_ID" in os.environ and "NODE_RANK" not in os.environ:
        raise ConfigurationError(
            f"trainer.num_nodes={num_nodes}: this job of SLURM has started one process, on its first node: write srun "
            "before the command in its script, with one task for each device (--ntasks-per-node), or let "
            "`cnnstrategies submit fit` write the script"
        )
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 and local_rank() == 0:
        rank_zero_info(
            f"This job of SLURM has {os.environ['SLURM_JOB_NUM_NODES']} nodes, and the run only this one: start it "
            "with srun, one task for each device, or from a login node with cnnstrategies submit"
        )
    return [LightningEnvironment()] if _in_slurm() else []


def _launcher() -> ClusterEnvironment | None:
    """What has started this process and its others; None where Lightning is to start them."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if (mpirun := next((kind for kind in MPIRUNS if kind.detect()), None)) is not None:
        return mpirun()
    is_task = int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP)) < FIRST_SPECIAL_STEP  # of srun
    return SLURMEnvironment(auto_requeue=False) if is_task and _in_slurm() else None


def _in_slurm() -> bool:
    # Asked first: Lightning's `detect` warns where srun is installed and not used.
    return "SLURM_NTASKS" in os.environ and SLURMEnvironment.detect()


def check_world(trainer: Trainer) -> None:
    """Refuse a launcher that has started another number of processes than the trainer divides the work among.

    Each would train on its share of the data, and nobody on the rest.

    Args:
        trainer: With its strategy made.

    Raises:
        ConfigurationError: It has; the message says how to start as many.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None) or _launcher()
    # With Lightning's own, its processes are told how many they are by the trainer.
    if environment is None or isinstance(environment, LightningEnvironment):
        return
    nodes, devices, world = trainer.num_nodes, trainer.num_devices, environment.world_size()
    try:
        environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ConfigurationError:
        raise  # mpirun's, which knows more.
    except ValueError as error:
        if world == nodes * devices:
            raise ConfigurationError(f"trainer.num_nodes={nodes}, trainer.devices={devices}: {error}") from error
    if world != nodes * devices:
        name, remedy = "The launcher", "start as many"
        if isinstance(environment, SLURMEnvironment):
            name = "SLURM"
            remedy = (
                f"have it start one for each device (#SBATCH --nodes={nodes} --ntasks-per-node={devices}, and srun)"
            )
        elif isinstance(environment, TorchElasticEnvironment):
            name, remedy = "torchrun", f"give it --nnodes={nodes} --nproc-per-node={devices}"
        raise ConfigurationError(
            f"{name} has started {world} {'process' if world == 1 else 'processes'}, and trainer.num_nodes="
            f"{nodes} x trainer.devices={devices} are {nodes * devices}: {remedy}, or change trainer.num_nodes and "
            "trainer.devices"
        )
