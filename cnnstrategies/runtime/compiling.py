"""Compilation of submodules with torch.compile, and the thread pool that compiled code needs in forked ranks."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies.strategies.protocol import facts_of


def renew_thread_pool() -> None:
    """Make sure that torch's thread pool exists in this process. Call this before the first backward pass.

    In a forked rank, torch creates a new pool when the pool is first used. The backward pass of a compiled network uses
    the pool from several threads at the same time, and if that is the first use, the process can abort ("Invalid
    thread pool!").
    """
    torch.set_num_threads(torch.get_num_threads())


def compile_parts(trainer: Trainer, parts: Iterable[nn.Module], backend: str) -> None:
    """Compile submodules in place, unless the strategy itself compiles the network.

    Args:
        trainer: The trainer with its strategy.
        parts: The submodules to compile.
        backend: Backend of ``torch.compile``.
    """
    renew_thread_pool()
    if not facts_of(trainer.strategy).compiles_network:
        for part in parts:
            part.compile(backend=backend)
