"""What ``cnnstrategies doctor`` finds out about its host: the place among the others, versions, memory and GPUs."""

import itertools
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lightning
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from cnnstrategies.cluster.environment import MpirunEnvironment, launcher

DRIVER = Path("/proc/driver/nvidia/gpus")  # Has an entry for each card, whatever torch can do with it.
# Where they say how many nodes there are.
NODES: dict[type[ClusterEnvironment], str] = {
    TorchElasticEnvironment: "GROUP_WORLD_SIZE",
    SLURMEnvironment: "SLURM_NNODES",
    LightningEnvironment: "NNODES",
}


@dataclass(frozen=True)
class Place:
    """A process of the doctor: its host, and its number there; only the first one of each host works."""

    node: int
    nodes: int
    local_rank: int
    main_address: str
    main_port: int


def find_place() -> Place | None:
    """Read the variables of srun, torchrun, mpirun, or those set by hand; None where nothing has started others."""
    environment = launcher()
    if environment is None and {"NNODES", "NODE_RANK"} <= os.environ.keys():
        environment = LightningEnvironment()
    if environment is None:
        return None
    if isinstance(environment, MpirunEnvironment):
        nodes = environment.world_size() // environment.local_size()
    else:
        nodes = int(os.environ[NODES[type(environment)]])
    address, port = environment.main_address, environment.main_port
    return Place(environment.node_rank(), nodes, environment.local_rank(), address, port)


def versions() -> dict[str, str]:
    """The versions that must be equal on all hosts."""
    try:
        own = version("cnnstrategies")
    except PackageNotFoundError:
        own = "not installed"
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "cnnstrategies": own,
        "NCCL": ".".join(map(str, nccl)) if nccl else "none",
    }


def shared_memory() -> int | None:
    """Size of ``/dev/shm``, which a container limits; None where there is none, as outside Linux."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def gpu_problems(variables: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """What to mend, a line each."""
    cards = len(list(driver.glob("*")))
    if not torch.cuda.is_available():
        what = "1 GPU" if cards == 1 else f"{cards} GPUs"
        return [f"{what} that torch {torch.__version__} cannot use: {_why_not()}"] if cards else []
    count = torch.cuda.device_count()
    found = []
    apart = [
        f"{one} and {other}"
        for one, other in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        found.append(
            f"GPUs {', '.join(apart)} do not reach each other's memory, and their messages go through the host's: put "
            "stages that send each other much on others, or look at nvidia-smi topo -p2p r"
        )
    if variables.get("NCCL_P2P_DISABLE", "0") != "0" and count > 1 and not apart:
        found.append(
            f"NCCL_P2P_DISABLE={variables['NCCL_P2P_DISABLE']} sends messages between GPUs through the host's memory, "
            "and they reach each other's: unset it"
        )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found.append(
            f"CUDA_LAUNCH_BLOCKING={variables['CUDA_LAUNCH_BLOCKING']} has the host wait for each kernel, those that "
            "wait for another rank too: unset it, but to look for a fault on one device"
        )
    return found


def _why_not() -> str:
    if torch.version.cuda is None:
        return "it is a build for CPUs; install one for CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty; unset it"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # Which of them torch raises depends on what is missing.
        return str(error).splitlines()[0]
    return f"it is built for CUDA {torch.version.cuda}; does the container pass the cards on (--gpus all, --nv)?"
