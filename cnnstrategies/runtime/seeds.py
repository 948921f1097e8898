"""Seeds that depend on several numbers."""

import hashlib


def mixed_seed(*numbers: int) -> int:
    """A seed for each tuple of numbers; neighbours such as (0, 1) and (1, 0) have nothing in common.

    Returns:
        An integer in [0, 2**63).
    """
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
