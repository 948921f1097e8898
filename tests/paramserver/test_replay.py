"""Traces that are played to real processes: what was promised holds; see `traces/processes.txt`."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replay import EPOCH, STEPS, Outcome, Places, Plan, expected, replay
from simulation import traces
from simulation.traces import Trace


def the_weights_are_those_of_one_process(plan: Plan, outcome: Outcome, exactly: str | None) -> None:
    """Every worker ends with what one process makes of all gradients, each of them counted once."""
    want = expected(plan, lambda step: range(plan.workers + (plan.joins and step >= EPOCH)))
    assert not outcome.errors, outcome
    assert len(outcome.values) == plan.workers
    for worker, values in outcome.values.items():
        assert _close(values, want), (worker, values, want)
        # All numbers of a trace are exact.
        assert not exactly or all(torch.equal(one, other) for one, other in zip(values, want, strict=True))


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


def _close(values: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(values, want, strict=True))


PROMISES: dict[str, Callable[..., None]] = {
    r"the weights are those of one process( to the last bit)?": the_weights_are_those_of_one_process,
    r"from some step on the weights are those without worker (\d)(, until it is back)?": without,
    r"all are told: (.*)": all_are_told,
}


@pytest.mark.parametrize("trace", traces.of("processes"), ids=str)
def test_what_was_promised_holds(trace: Trace, tmp_path: Path) -> None:
    plan = traces.plan(Plan, trace.plan)
    outcome = replay(plan, trace.cues, Places(tmp_path))
    checks = [
        (check, match) for said in trace.then for text, check in PROMISES.items() if (match := re.fullmatch(text, said))
    ]
    assert len(checks) == len(trace.then) > 0, trace.then
    for check, match in checks:
        check(plan, outcome, *match.groups())
