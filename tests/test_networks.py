"""The networks for small images."""

import pytest
import torch

from cnnstrategies.networks import SmallCNN, SmallResNet

pytestmark = pytest.mark.light


def test_small_cnn_needs_a_block():
    with pytest.raises(ValueError, match=r"widths=\[\]: set the channels"):
        SmallCNN(10, widths=[])


@pytest.mark.parametrize(("blocks", "parameters"), [(3, 269_722), (5, 464_154), (9, 853_018)])
def test_small_resnets_have_the_published_sizes(blocks, parameters):
    """0.27 M, 0.46 M and 0.85 M in table 6 of He et al. 2016."""
    network = SmallResNet(10, blocks=blocks)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
