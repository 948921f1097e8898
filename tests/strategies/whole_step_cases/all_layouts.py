"""All cases under all layouts; ``make test-cases`` runs this file."""

import pytest

from whole_step_cases import CASES
from whole_step_cases.checking import check, whole_step
from whole_step_cases.running import on_ranks

LAYOUTS = ([1, 1], [2, 1], [1, 2], [1, 1, 1])


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
