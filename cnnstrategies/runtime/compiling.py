"""Compile what a module computes, unless the strategy does."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies.strategies.protocol import facts_of


def compile_parts(trainer: Trainer, parts: Iterable[nn.Module], backend: str) -> None:
    """Compile parts of a module in their places, unless the strategy compiles the network itself."""
    # A forked rank's first use of torch's thread pool replaces it. With a compiled network backward starts several
    # threads, whose first uses at once can end the process ("Invalid thread pool!"); so use it here.
    torch.set_num_threads(torch.get_num_threads())
    if not facts_of(trainer.strategy).compiles_network:
        for part in parts:
            part.compile(backend=backend)
