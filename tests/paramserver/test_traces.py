"""Runs that once went wrong, or that say what is promised, as files: see `traces/`, and `simulation/traces.py`."""

import re
from pathlib import Path
from typing import Any

import pytest
from simulation import control, traces
from simulation.data import run as data
from simulation.faults import Moment
from simulation.outcome import Outcome
from simulation.traces import Script, Trace, TraceError

pytestmark = pytest.mark.light
FOLDER = Path(__file__).parent / "traces"
SIMULATED = {"control": control, "data": data}


def of(plane: str) -> list[Trace]:
    """The traces of a plane."""
    every = [trace for file in sorted(FOLDER.glob("*.txt")) for trace in traces.read(file.read_text())]
    return [trace for trace in every if trace.plane == plane]


def simulate(trace: Trace, traced: bool = False) -> Outcome:
    """Run a trace in the simulator; each of its moments must come."""
    plane: Any = SIMULATED[trace.plane]
    script = Script(trace, plane.TIMEOUT)
    outcome: Outcome = plane.run(traces.plan(plane.Plan, trace.plan), script, trace.pace, traced)
    missed = [cue.text for cue in script.cues.left]
    assert not missed, f"{trace}: these moments do not come: {missed}"
    return outcome


@pytest.mark.parametrize("trace", of("control") + of("data"), ids=str)
def test_nothing_is_violated(trace: Trace) -> None:
    outcome = simulate(trace)
    assert outcome.violation is None, "\n".join((str(outcome.violation), *simulate(trace, traced=True).trace[-60:]))
    for promise in trace.then:
        assert re.search(promise, outcome.end), f"{trace}: it ends so: {outcome.end}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  control: workers 2", "'control: workers 2' belongs to no trace"),
        (
            "a\n  control: workers 2\n  worker 0's 3th hallo: gone",
            'a: nobody understands "worker 0\'s 3th hallo: gone"',
        ),
        ("a\n  control: worker 2", "a plan has no worker: it has workers, servers"),
        ("a\n  control: workers 2\n  worker 1's 999th hello to coordinator: lost", "these moments do not come: "),
    ],
)
def test_what_cannot_be_played_is_refused(text: str, message: str) -> None:
    with pytest.raises((TraceError, AssertionError), match=re.escape(message)):
        simulate(*traces.read(text))


def test_moments_count_from_the_start_or_the_moment_before() -> None:
    (trace,) = traces.read(
        "a\n  control:\n  worker 0's 2nd beat to coordinator: lost\n  worker 0's 2nd take after that: late by 0.2 s\n"
        "  worker 0 (life 1)'s 1st beat: kill server 2\n"
    )
    cues = traces.Cues(trace.cues)
    sent = [("worker 0", kind, "coordinator") for kind in ("take", "beat", "beat", "beat", "take", "take", "take")]
    came = [
        cue and cue.moment for cue in (cues.sends(*one) for one in (*sent, ("worker 0 (life 1)", "beat", "server 1")))
    ]
    lost, late, kill = Moment("lost"), Moment("late", 0.2), Moment("kill", 0.0, ("server", 2))
    assert came == [None, None, lost, None, None, late, None, kill]
    assert not cues.left
