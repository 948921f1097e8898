"""Runs that once went wrong, or that say what is promised, as files: see `traces/`, and `simulation/traces.py`."""

import re
from pathlib import Path
from typing import Any

import pytest

from cnnstrategies.paramserver.simulation import control, traces
from cnnstrategies.paramserver.simulation.data import run as data
from cnnstrategies.paramserver.simulation.outcome import Outcome
from cnnstrategies.paramserver.simulation.traces import Script, Trace

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
