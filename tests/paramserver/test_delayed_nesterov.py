"""The outer optimizer of workers that make outer steps each on its own."""

import pytest
import torch
from torch import nn

from cnnstrategies.paramserver.delayed_nesterov import DelayedNesterov

pytestmark = pytest.mark.light


def differences(rounds: int, workers: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(workers)] for _ in range(rounds)
    ]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [1, 3])
def test_rounds_that_begin_with_the_same_weights_equal_nesterovs_momentum_on_their_mean(
    workers: int, momentum: float
) -> None:
    one, other = (nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(2))
    delayed = DelayedNesterov([one], lr=0.7, momentum=momentum, workers=workers)
    torchs = torch.optim.SGD([other], lr=0.7, momentum=momentum, nesterov=momentum > 0)
    for number, each in enumerate(differences(4, workers)):
        for difference in each:
            one.grad = difference
            delayed.step()
        other.grad = torch.stack(each).mean(0)
        torchs.step()
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        if number == 1 and momentum:  # As after a checkpoint that common outer steps have left.
            delayed.state[one] = {"momentum_buffer": torchs.state[other]["momentum_buffer"].clone()}


def test_within_a_round_each_moves_the_weights_by_its_own_share() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = DelayedNesterov([parameter], lr=0.5, momentum=0.5, workers=4)
    for number in range(1, 4):
        parameter.grad = torch.ones(1)
        optimizer.step()
        assert parameter.item() == -0.125 * number
    optimizer.step()
    assert parameter.item() == -0.5 - 0.25


def test_a_round_ends_when_as_many_have_come_as_there_are_workers_now() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = DelayedNesterov([parameter], lr=1.0, momentum=0.5, workers=4)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["workers"] = 2  # Two have died.
    optimizer.step()
    assert parameter.item() == -0.25 - 0.5 - 0.5
    assert optimizer.state[parameter]["momentum_buffer"].item() == 1.0
