"""The coordinator and its members in virtual time, with faults: the code that runs is the code that is simulated."""

from collections import Counter

import pytest
from simulation import traces
from simulation.control import TIMEOUT, Plan, run, simulate
from simulation.run import PLANES, explain, shrink

from cnnstrategies.paramserver.core.requests import Asking

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
    faults = "kill worker", "kill server", "kill coordinator", "pause worker", "cut worker", "deaf worker", "lost"
    for kind in (*faults, "join", "join after a boundary"):
        assert counts[kind], kind


def test_a_seed_is_all_that_is_needed_to_repeat_a_run():
    assert simulate(3, traced=True) == simulate(3, traced=True)
    assert simulate(3).events == simulate(3, traced=True).events


def test_what_is_left_after_shrinking_is_needed():
    assert shrink(range(100), lambda part: {3, 70} <= set(part)) == [3, 70]
    assert shrink(range(10), lambda part: True) == []


def test_a_failing_seed_is_explained_by_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Asking.on_reply
    # A request that never came is not sent again.
    monkeypatch.setattr(Asking, "on_reply", lambda self, now, message: (right(self, now, message)[0], []))
    seed, outcome = next((seed, found) for seed in range(SEEDS) if (found := simulate(seed)).violation)
    text, _, lines = explain(seed, outcome, PLANES["control"]).partition("\n(of ")
    (trace,) = traces.read(text)
    assert trace.title.startswith(f"seed {seed}: 17: ")
    assert 1 <= len(trace.timed) + len(trace.cues) < int(lines.partition(" ")[0])
    assert "coordinator 0 starts" in lines
    script = traces.Script(trace, TIMEOUT)
    again = run(traces.plan(Plan, trace.plan), script, trace.pace)
    assert f"seed {seed}: {again.violation}" == trace.title, "what it prints fails in the same way"
    assert not script.cues.left
