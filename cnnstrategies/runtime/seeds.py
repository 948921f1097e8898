"""Computation of a seed from several numbers, and seeding of the random generators."""

import hashlib
import random

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
