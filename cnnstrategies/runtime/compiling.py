"""Compile what a module computes, unless the strategy does."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from torch import nn


def compile_parts(trainer: Trainer, parts: Iterable[nn.Module], backend: str) -> None:
    """Compile parts of a module in their places; a strategy with ``compiles_stages`` compiles what it makes of them."""
    # A forked rank's first use of torch's thread pool replaces it. With a compiled network backward starts several
    # threads, whose first uses at once can end the process ("Invalid thread pool!"); so use it here.
    torch.set_num_threads(torch.get_num_threads())
    if not getattr(trainer.strategy, "compiles_stages", False):
        for part in parts:
            part.compile(backend=backend)
