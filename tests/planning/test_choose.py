"""Choosing the layout of a real network."""

import functools
from typing import Any

import pytest
import torch
from conftest import in_fork
from torch import nn

from cnnstrategies.pipeline.tracing import cut_positions, trace
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.measure import measure_profile, states_of
from cnnstrategies.planning.predict import choose_layout

pytestmark = pytest.mark.light


def alexnet_like() -> nn.Module:
    """Convolutions with the time, a classifier with the parameters."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(8), nn.Flatten(), nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10))


@functools.cache
def profile(precision: str = "32-true") -> Profile:
    images, cpu = torch.randn(8, 3, 32, 32), torch.device("cpu")
    return measure_profile(trace(alexnet_like()), images, 16, cpu, precision, channels_last=False)


def job(devices: int, link: Link, samples: int, **fixed: Any) -> Job:
    return Job(profile(), Cluster.flat(devices, link), samples, **fixed)


def test_the_parameter_heavy_classifier_is_not_replicated_over_a_slow_link() -> None:
    layout, _ = choose_layout(job(4, Link(bandwidth=12.5e6, latency=1e-4), 64, microbatches=8, stages=2))
    assert layout.replicas[0] > layout.replicas[1]
    assert layout.replicas[1] == 1
    assert layout.cuts[0] in cut_positions(trace(alexnet_like()))


def test_half_precision_halves_what_is_sent() -> None:
    whole, half = (profile(precision).costs.values for precision in ("32-true", "bf16-mixed"))
    assert half[0].bytes * 2 == whole[0].bytes


def test_an_optimizer_holds_what_its_kind_and_options_say() -> None:
    def held() -> list[int]:
        parameters = [nn.Parameter(torch.zeros(3))]
        kinds = (
            torch.optim.SGD(parameters, 0.1),
            torch.optim.SGD(parameters, 0.1, momentum=0.9),
            torch.optim.AdamW(parameters),
            torch.optim.AdamW(parameters, amsgrad=True),
        )
        return [states_of(optimizer) for optimizer in kinds]

    assert in_fork(held) == [0, 1, 2, 3]  # AdamW asks for CUDA.
