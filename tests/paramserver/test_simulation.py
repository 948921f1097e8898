"""The parameter server's own code in virtual time, with faults."""

import re
from collections import Counter

import pytest

from cnnstrategies.paramserver.core.requests import Asking
from tests.paramserver.simulation import traces
from tests.paramserver.simulation.faults import Moment
from tests.paramserver.simulation.run import PLANES, explain, play, shrink
from tests.paramserver.simulation.traces import Trace, TraceError

pytestmark = pytest.mark.light
SEEDS = 70
HIT = {f"{kind} {role}" for kind in ("kill", "pause", "cut", "deaf", "mute") for role in ("worker", "server")}
FAULTS = {
    "control": {"kill worker", "kill server", "kill coordinator", "pause worker", "cut worker", "deaf worker", "lost"}
    | {"join", "join after a boundary", "return after a boundary"},
    "data": HIT | {"kill coordinator", "sleep", "lost", "late"},
}


def check(plane: str, pytestconfig: pytest.Config) -> None:
    """Simulate the seeds of a plane. For a failing seed, `make simulate FIRST=<seed> SEEDS=1` shows the cause."""
    counts: Counter[str] = Counter()
    first = SEEDS * pytestconfig.getoption("seed_offset")
    for seed in range(first, first + SEEDS):
        outcome = PLANES[plane](seed)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        counts += outcome.counts
    assert counts.keys() >= FAULTS[plane]


def test_no_simulated_run_of_the_coordinator_violates_an_invariant(pytestconfig: pytest.Config) -> None:
    check("control", pytestconfig)


def test_no_simulated_run_of_workers_and_servers_violates_an_invariant(pytestconfig: pytest.Config) -> None:
    check("data", pytestconfig)


@pytest.mark.parametrize("plane", PLANES)
def test_a_run_depends_only_on_its_seed(plane: str) -> None:
    simulate = PLANES[plane]
    assert simulate(3, traced=True) == simulate(3, traced=True)
    assert simulate(3).events == simulate(3, traced=True).events


def test_a_failing_seed_is_explained_by_few_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shrink(range(100), lambda part: {3, 70} <= set(part)) == [3, 70]
    right, plane = Asking.on_reply, PLANES["control"]
    # With this mistake, a lost request is not sent again.
    monkeypatch.setattr(Asking, "on_reply", lambda self, now, message: (right(self, now, message)[0], []))
    seed, outcome = next((seed, candidate) for seed in range(SEEDS) if (candidate := plane(seed)).violation)
    text, _, lines = explain(seed, outcome, plane).partition("\n(of ")
    (trace,) = traces.read(text)
    assert trace.title.startswith(f"seed {seed}: 13: ")
    assert 1 <= len(trace.timed) + len(trace.cues) < int(lines.partition(" ")[0])
    assert "coordinator 0 starts" in lines
    assert f"seed {seed}: {play(trace).violation}" == trace.title, "the printed trace violates the same invariant"


@pytest.mark.parametrize("trace", traces.of("control") + traces.of("data"), ids=str)
def test_no_trace_violates_an_invariant(trace: Trace) -> None:
    """Simulate a run that once went wrong, or a run whose end is promised; see `traces/`."""
    outcome = play(trace)
    assert outcome.violation is None, "\n".join((str(outcome.violation), *play(trace, traced=True).trace[-60:]))
    for promise in trace.then:
        assert re.search(promise, outcome.end), f"{trace}: the end {outcome.end!r} does not match {promise!r}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  control: workers 2", "'control: workers 2' belongs to no trace"),
        ("a\n  control:\n  worker 0's 3th hallo: gone", 'a: cannot parse "worker 0\'s 3th hallo: gone"'),
        ("a\n  control: worker 2", "a plan has no worker: it has workers, servers"),
        ("a\n  control: workers 2\n  worker 1's 999th hello to coordinator: lost", "these moments do not come: "),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused(text: str, message: str) -> None:
    with pytest.raises((TraceError, AssertionError), match=re.escape(message)):
        play(*traces.read(text))


def test_moments_count_from_the_start_or_the_moment_before() -> None:
    (trace,) = traces.read(
        "a\n  control:\n  worker 0's 2nd beat to coordinator: lost\n  worker 0's 2nd take after that: late by 0.2 s\n"
        "  worker 0 (incarnation 1)'s 1st beat: kill server 2\n"
    )
    cues = traces.Cues(trace.cues)
    sent = [("worker 0", kind, "coordinator") for kind in ("take", "beat", "beat", "beat", "take", "take", "take")]
    moments = [
        cue and cue.moment
        for cue in (cues.sends(*message) for message in (*sent, ("worker 0 (incarnation 1)", "beat", "server 1")))
    ]
    lost, late, kill = Moment("lost"), Moment("late", 0.2), Moment("kill", 0.0, ("server", 2))
    assert moments == [None, None, lost, None, None, late, None, kill]
    assert not cues.left
