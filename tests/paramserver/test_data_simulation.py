"""Workers and servers in virtual time, with faults: the code that runs is the code that is simulated."""

from collections import Counter
from functools import partial

import pytest

from cnnstrategies.paramserver.simulation.data.run import simulate
from cnnstrategies.paramserver.simulation.run import explain

pytestmark = pytest.mark.light
SEEDS = 100
# Which have found something that was not right.
FOUND = (
    224, 262, 324, 473, 846, 884, 886, 932, 1296, 1313, 1328, 1452, 1613, 1860, 2212, 2419, 2421, 2739, 3599, 3790,
    4336, 4575, 5120, 5377, 5511, 6176, 7050, 7468, 8164, 9401, 9545, 12757, 16996, 17315, 55482, 78794, 100215, 104959,
    110147, 115554, 121480, 129516, 203758, 305178, 325315, 705776,
    631440,
)  # fmt: skip
FOUND_FOLLOWING = (
    65, 1070, 1176, 2405, 2968, 4376, 6740, 12757, 16409, 16870, 44894, 54503, 59922, 60803, 61178, 65082,
    122304, 218639, 243194, 633366, 755348,
)  # fmt: skip


def test_nothing_is_violated(pytestconfig: pytest.Config) -> None:
    """In half of the runs a coordinator follows another; `make simulate FIRST=... SEEDS=1` explains a seed."""
    counts: Counter[str] = Counter()
    first = SEEDS * pytestconfig.getoption("seed_offset")
    for seed in range(first, first + SEEDS):
        outcome = simulate(seed, successor=seed % 2 > 0)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        counts += outcome.counts
    kinds = [f"{kind} {role}" for kind in ("kill", "pause", "cut", "deaf", "mute") for role in ("worker", "server")]
    for kind in (*kinds, "kill coordinator", "sleep", "full disk", "lost with a connection", "delayed"):
        assert counts[kind], kind


def test_the_seeds_that_found_a_fault_hold_now() -> None:
    for seed in FOUND:
        outcome = simulate(seed)
        assert outcome.violation is None, explain(seed, outcome, simulate)


def test_the_seeds_that_found_a_fault_when_a_coordinator_follows_another_hold_now() -> None:
    """From the newest view that somebody knows; those that came after it are new to all."""
    follows = partial(simulate, successor=True)
    for seed in FOUND_FOLLOWING:
        outcome = follows(seed)
        assert outcome.violation is None, explain(seed, outcome, follows)


def test_a_seed_is_all_that_is_needed_to_repeat_a_run() -> None:
    assert simulate(3, traced=True) == simulate(3, traced=True)
    assert simulate(3).events == simulate(3, traced=True).events
