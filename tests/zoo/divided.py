"""Published networks train on divided images as on one process; `make test-zoo` runs this file."""

import pytest

from tests.zoo.divided_networks import NETWORKS
from tests.zoo.divided_step import compare
from tests.zoo.trial import part_of


@pytest.mark.parametrize("name", part_of(NETWORKS))
def test_step_equals_one_process(name: str) -> None:
    result = compare(NETWORKS[name])
    verdicts = {count: part["verdict"] for count, part in result["parts"].items()}
    assert set(verdicts.values()) <= {"equal", "rounding"}, result
