"""Longest waits of tests for something that happens soon: generous on slow machines, and short in a mutant's run."""

import math

# A mutant's test waits for something that never happens, so `test_mutants` sets a limit of some seconds.
limit = math.inf


def at_most(seconds: float) -> float:
    """Return the seconds to wait: the given number, or the limit if it is lower."""
    return min(seconds, limit)
