"""Choosing the layout of a real network."""

import pytest
import torch
from torch import nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.tracing import cut_positions, trace
from cnnstrategies.planning.choose import choose_layout
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.request import Request

pytestmark = pytest.mark.light


def alexnet_like() -> nn.Module:
    """Convolutions with the time, a classifier with the parameters."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(8), nn.Flatten(), nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10))


def test_the_parameter_heavy_classifier_is_not_replicated_over_a_slow_link() -> None:
    network = alexnet_like()
    link = Link(bandwidth=12.5e6, latency=1e-4)
    layout, _ = choose_layout(network, torch.randn(8, 3, 32, 32), Request(4, 8, stages=2), link)
    assert layout.replicas[0] > layout.replicas[1]
    assert layout.replicas[1] == 1
    assert layout.cuts[0] in cut_positions(trace(network))


def test_stages_and_even_replicas_are_kept() -> None:
    layout, _ = choose_layout(alexnet_like(), torch.randn(4, 3, 32, 32), Request(4, 4, replicas=(2, 2)))
    assert layout.replicas == (2, 2)


def test_a_network_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="memory_limit=1000: on 2 devices with 4 microbatches a device needs"):
        choose_layout(alexnet_like(), torch.randn(4, 3, 32, 32), Request(2, 4, replicas=(1, 1), memory_limit=1000))
