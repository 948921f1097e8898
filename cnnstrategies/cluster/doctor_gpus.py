"""What is wrong with the GPUs of a host, as far as it is known to bite."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/gpus")  # Has an entry for each card, whatever torch can do with it.


def gpu_problems(variables: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """What to mend, a line each.

    Args:
        variables: The environment.
        driver: Where NVIDIA's driver lists its cards.
    """
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
