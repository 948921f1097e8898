"""Computation of a seed from several numbers."""

import hashlib


def mixed_seed(*numbers: int) -> int:
    """Return a hash of several numbers as a seed. Similar numbers, such as (0, 1) and (1, 0), have unrelated seeds.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
