"""Computation of a seed from several numbers, and seeding of the random generators."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed_seed(*numbers: int) -> int:
    """Return a hash of several numbers as a seed. Similar numbers, such as (0, 1) and (1, 0), have unrelated seeds.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the random generators of torch (only on the CPU), NumPy and Python."""
    # `torch.manual_seed` would also change the accelerators' generators.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


@contextmanager
def restores_random_numbers() -> Iterator[None]:
    """Restore torch's (only on the CPU), NumPy's and Python's random numbers when the context ends.

    Unlike Lightning's ``isolate_rng``, this also restores them if the context ends by an exception.
    """
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
