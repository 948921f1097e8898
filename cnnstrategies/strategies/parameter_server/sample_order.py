"""The order of an epoch's samples, which all workers must know alike."""

import random
import zlib
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler

from cnnstrategies._lightning_private import wrapped_sampler
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.seeds import mixed_seed
from cnnstrategies.strategies.parameter_server.group import WorkerGroup


def items_of(sampler: Any, epoch: int) -> list[Any]:
    """All items of an epoch, those of all ranks in turn.

    What is drawn at random is drawn anew for each rank, and in each worker: all begin with the same numbers.

    Args:
        sampler: A batch sampler or sampler over a ``DistributedSampler``.
        epoch: Which one.
    """
    inner = distributed(sampler)
    inner.set_epoch(epoch)
    own, shares = inner.rank, []
    with isolate_rng(include_cuda=False):
        for rank in range(inner.num_replicas):
            inner.rank = rank
            _seed_all(mixed_seed(inner.seed, epoch))
            shares.append(list(sampler))
    inner.rank = own
    return [share[place] for place in range(len(shares[0])) for share in shares if place < len(share)]


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would change that of accelerators, too.
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def check_order(sampler: Any, group: WorkerGroup) -> None:
    """Refuse a sampler of the user's own that gives another order each time, or in each worker; a collective.

    Args:
        sampler: A batch sampler or sampler over a ``DistributedSampler``.
        group: The workers of the run.

    Raises:
        ConfigurationError: It is so: some samples would be given out twice, and others not at all.
    """
    inner = distributed(sampler)
    if not isinstance(inner, DistributedSamplerWrapper):
        return
    drawn = [zlib.crc32(repr(items_of(sampler, 0)).encode()) for _ in range(2)]
    name = type(wrapped_sampler(inner)).__name__
    if drawn[0] != drawn[1]:
        raise ConfigurationError(
            f"{name} gives another order of an epoch's samples each time it is asked: data_dispatch: dynamic gives out "
            "places in an order that all workers know; leave out a generator of its own, as torch's is then seeded for "
            "each epoch, or use data_dispatch: static"
        )
    if len(set(group.gather(drawn[0], "order of the samples").values())) > 1:
        raise ConfigurationError(
            f"{name} gives the samples in another order in each worker: data_dispatch: dynamic gives out places in an "
            "order that all workers know; make it from the same seed in each (seed_everything), or use data_dispatch: "
            "static"
        )


def distributed(sampler: Any) -> DistributedSampler[Any]:
    """The distributed sampler in a batch sampler or sampler.

    Raises:
        ConfigurationError: There is none, so workers would not agree on what a position means.
    """
    inner = getattr(sampler, "sampler", sampler)
    if not isinstance(inner, DistributedSampler):
        raise ConfigurationError(
            f"the training data is sampled by {type(inner).__name__}: data_dispatch: dynamic needs a "
            "DistributedSampler, which Lightning puts in place unless use_distributed_sampler is false"
        )
    return inner
