"""Traces that are played to real processes: what was promised holds; see `traces/processes.txt`."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from replay import EPOCH, SLICE, STEPS, Outcome, Places, Plan, expected, replay
from simulation import traces
from simulation.traces import Trace
from test_traces import of

Slices = list[torch.Tensor]


def the_weights_are_those_of_one_process(plan: Plan, outcome: Outcome, exactly: str | None) -> None:
    """Every worker ends with what one process makes of all gradients, each of them counted once."""
    want = expected(plan, lambda step: range(plan.workers))
    assert not outcome.errors, outcome
    assert len(outcome.values) == plan.workers
    for worker, values in outcome.values.items():
        assert _close(values, want), (worker, values, want)
        # All numbers of a trace are exact.
        assert not exactly or all(torch.equal(one, other) for one, other in zip(values, want, strict=True))
    assert "are lost" not in outcome.output


def without(plan: Plan, outcome: Outcome, worker: str, back: str | None) -> None:
    """From some step on the others go on without it, until it comes back; of no step there is only a part."""
    until = EPOCH if back else STEPS
    others = [one for one in range(plan.workers) if one != int(worker)]
    results = [
        expected(plan, lambda step, first=first: others if first <= step < until else range(plan.workers))
        for first in range(EPOCH)
    ]
    assert not outcome.errors, outcome
    assert sorted(outcome.values) == (list(range(plan.workers)) if back else others)
    for values in outcome.values.values():
        assert any(_close(values, result) for result in results), (values, results)


def all_are_told(plan: Plan, outcome: Outcome, text: str) -> None:
    """Every worker is told why it ends."""
    assert not outcome.values
    assert sorted(outcome.errors) == list(range(plan.workers))
    for error in outcome.errors.values():
        assert re.search(text, error), error


def as_many_updates_are_lost_as_the_server_says(plan: Plan, outcome: Outcome) -> None:
    """Each slice lacks steps that follow each other: at most, and one of them, what the only server says is lost."""
    said = re.findall(r"server 0 goes on from its last snapshot: (\d+) updates since then are lost", outcome.output)
    most = int(said[-1]) if said else 0
    results: dict[int, list[Slices]] = {}
    for lost in range(most + 1):
        for first in range(STEPS - lost + 1):
            left_out = range(first, first + lost)
            got = expected(plan, lambda step, left=left_out: () if step in left else range(plan.workers))
            results.setdefault(lost, []).append(_slices(got))
    assert not outcome.errors, outcome
    (values,) = outcome.values.values()
    lacks = [
        min((lost for lost, some in results.items() for one in some if _close([value], [one[number]])), default=-1)
        for number, value in enumerate(_slices(values))
    ]
    assert min(lacks) >= 0, (values, most)
    assert max(lacks) == most


def _slices(values: Sequence[torch.Tensor]) -> Slices:
    return [part for value in values for part in value.split(SLICE)]


def _close(values: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(values, want, strict=True))


PROMISES: dict[str, Callable[..., None]] = {
    r"the weights are those of one process( to the last bit)?": the_weights_are_those_of_one_process,
    r"from some step on the weights are those without worker (\d)(, until it is back)?": without,
    r"all are told: (.*)": all_are_told,
    r"as many updates are lost as the server says": as_many_updates_are_lost_as_the_server_says,
}


@pytest.mark.parametrize("trace", of("processes"), ids=str)
def test_what_was_promised_holds(trace: Trace, tmp_path: Path) -> None:
    plan = traces.plan(Plan, trace.plan)
    outcome = replay(plan, trace.cues, Places(tmp_path))
    checks = [
        (check, match) for said in trace.then for text, check in PROMISES.items() if (match := re.fullmatch(text, said))
    ]
    assert len(checks) == len(trace.then) > 0, trace.then
    for check, match in checks:
        check(plan, outcome, *match.groups())
