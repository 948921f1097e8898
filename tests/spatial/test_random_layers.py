"""Random layers of random networks; `random_layers.py` tries more of them."""

import pytest

from tests.spatial.random_layers import check_seed

PARTS, NETWORKS = 2, 14


@pytest.mark.light
@pytest.mark.parametrize("part", range(PARTS))
def test_random_layers_equal_one_process(part: int) -> None:
    for seed in range(part, NETWORKS, PARTS):
        assert not check_seed(seed), f"the network of seed {seed} has gathered rows"
