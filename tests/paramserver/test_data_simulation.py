"""Workers and servers in virtual time, with faults: the code that runs is the code that is simulated."""

from collections import Counter

import pytest
from simulation.data.run import simulate

pytestmark = pytest.mark.light
SEEDS = 100


def test_nothing_is_violated(pytestconfig: pytest.Config) -> None:
    """`make simulate FIRST=... SEEDS=1` explains a seed."""
    counts: Counter[str] = Counter()
    first = SEEDS * pytestconfig.getoption("seed_offset")
    for seed in range(first, first + SEEDS):
        outcome = simulate(seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        counts += outcome.counts
    kinds = [f"{kind} {role}" for kind in ("kill", "pause", "cut", "deaf", "mute") for role in ("worker", "server")]
    for kind in (*kinds, "kill coordinator", "sleep", "lost with a connection", "delayed"):
        assert counts[kind], kind


def test_a_seed_is_all_that_is_needed_to_repeat_a_run() -> None:
    assert simulate(3, traced=True) == simulate(3, traced=True)
    assert simulate(3).events == simulate(3, traced=True).events
