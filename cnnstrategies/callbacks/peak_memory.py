"""The most memory that each device of a run has held."""

import resource
import sys
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

MOST = 8  # Devices that are named one by one.


def peak_bytes(trainer: Trainer) -> list[int]:
    """Of each rank, in their order; a collective.

    On a GPU what torch has allocated there, else what the process has held.
    """
    device = trainer.strategy.root_device
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device)
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    of_all: list[int] = trainer.strategy.all_gather(torch.tensor([held], device=device)).flatten().tolist()
    return of_all


def in_words(held: Sequence[int], gpus: bool) -> str:
    """What :func:`peak_bytes` gives, in a line."""
    megabytes = [f"{one / 1e6:,.0f}" for one in held]
    many = f"{min(held) / 1e6:,.0f} to {max(held) / 1e6:,.0f} MB"
    if len(held) == 1:
        return f"{megabytes[0]} MB of the {'GPU' if gpus else 'process'}"
    numbers = many if len(held) > MOST else f"{' and '.join(megabytes) if len(held) == 2 else ', '.join(megabytes)} MB"
    return f"{numbers} of {len(held)} {'GPUs' if gpus else 'processes'}"
