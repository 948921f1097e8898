"""Programs as users write them: the whole step trains the same weights, logs and read values as one device."""

from collections.abc import Sequence
from typing import Any

import pytest
from whole_step_cases import CASES, Case
from whole_step_cases.running import on_one_device, on_ranks, verdict

from cnnstrategies.strategies.whole_step.strategy import WholeStepStrategy

# Ranks that have diverged end after the time-out. Here this would be a fault.
TIMEOUT = 30.0
# One case of each kind. `make test` runs these.
SELECTION = (
    *("kl_term", "scaled_by_position", "simclr_two_calls", "byol", "branch_on_loss", "sharpness_aware", "finetuning"),
    *("averaged_weights", "small_unet", "projected_descent", "validation_outputs", "declared_later"),
)
LAYOUTS = ([1, 1], [2, 1], [1, 2], [1, 1, 1])


def whole_step(case: Case, replicas: Sequence[int]) -> Any:
    cuts = list(case.cuts[: len(replicas) - 1])
    options = {"cuts": cuts, "microbatches": case.microbatches, "submodule": case.submodule, "timeout": TIMEOUT}
    return WholeStepStrategy(replicas=list(replicas), **options)


def check(names: Sequence[str], replicas: Sequence[int]) -> None:
    expected = on_one_device(names)
    verdicts = map(verdict, expected, on_ranks(names, whole_step, replicas))
    assert dict(zip(names, verdicts, strict=True)) == dict.fromkeys(names, "equal")


def test_a_program_of_each_kind_trains_as_on_one_device() -> None:
    check(SELECTION, [1, 1])


@pytest.mark.cluster
@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_program_trains_as_on_one_device(name: str, replicas: list[int]) -> None:
    if CASES[name].error:
        with pytest.raises(AssertionError, match=CASES[name].error):
            on_ranks([name], whole_step, replicas)
    else:
        check([name], replicas)
