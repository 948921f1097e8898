"""All cases under all layouts; ``make test-cases`` runs this file."""

import pytest

from tests.strategies.whole_step_cases import CASES
from tests.strategies.whole_step_cases.checking import check, check_error

LAYOUTS = ([1, 1], [2, 1], [1, 2], [1, 1, 1])


@pytest.mark.parametrize("replicas", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_program_trains_as_on_one_device(name: str, replicas: list[int]) -> None:
    case = CASES[name]
    if case.error:
        check_error(case, replicas)
    else:
        check([case], replicas)
