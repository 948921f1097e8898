"""Programs as users write them: the whole step trains the same weights, logs and read values as one device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from whole_step_cases import CASES, Case
from whole_step_cases.running import on_one_device, on_ranks, verdict

from cnnstrategies.strategies.whole_step.strategy import WholeStepStrategy

# Ranks that have diverged end after the time-out. Here this would be a fault.
TIMEOUT = 30.0
# Cases of several kinds, which `make test` runs with three steps.
SELECTION = ("kl_term", "byol", "branch_on_loss", "logged_metric", "finite_loss", "small_unet", "pruned")
LAYOUTS = ([1, 1], [2, 1], [1, 2], [1, 1, 1])


def whole_step(case: Case, replicas: Sequence[int]) -> Any:
    cuts = list(case.cuts[: len(replicas) - 1])
    options = {"cuts": cuts, "microbatches": case.microbatches, "submodule": case.submodule, "timeout": TIMEOUT}
    return WholeStepStrategy(replicas=list(replicas), **options)


def check(cases: Sequence[Case], replicas: Sequence[int]) -> None:
    verdicts = map(verdict, on_one_device(cases), on_ranks(cases, whole_step, replicas))
    names = [case.name for case in cases]
    assert dict(zip(names, verdicts, strict=True)) == dict.fromkeys(names, "equal")


def test_programs_of_several_kinds_train_as_on_one_device() -> None:
    check([replace(CASES[name], epochs=1, samples=20) for name in SELECTION], [1, 1])


@pytest.mark.cluster
@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_program_trains_as_on_one_device(name: str, replicas: list[int]) -> None:
    case = CASES[name]
    if case.microbatches < max(replicas):
        pytest.skip("each replica needs a microbatch")
    if case.error:
        with pytest.raises(AssertionError, match=case.error):
            on_ranks([case], whole_step, replicas)
    else:
        check([case], replicas)
