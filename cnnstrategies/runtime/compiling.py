"""Compilation of a module's parts, unless the strategy compiles the network."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies.strategies.protocol import facts_of


def compile_parts(trainer: Trainer, parts: Iterable[nn.Module], backend: str) -> None:
    """Compile parts of a module in their places, unless the strategy compiles the network itself."""
    # A forked rank replaces torch's thread pool when it first uses the pool. With a compiled network, backward starts
    # several threads, and simultaneous first uses can end the process ("Invalid thread pool!"). This is a first use.
    torch.set_num_threads(torch.get_num_threads())
    if not facts_of(trainer.strategy).compiles_network:
        for part in parts:
            part.compile(backend=backend)
