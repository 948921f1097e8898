"""Tests of the ranks' first state: it is rank 0's, and its messages are small, so that heartbeats do not wait long."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.strategies.parameter_server.start import PIECE_BYTES, take_state_of_rank_zero

pytestmark = pytest.mark.light


class Group:
    """Collectives of two ranks that run one after the other: rank 0's broadcasts are replayed for rank 1."""

    def __init__(self) -> None:
        self.rank = 0
        self.messages: list[list[Tensor]] = []

    def broadcast(self, value: list[Tensor], source: int) -> Any:
        if self.rank == 0:
            self.messages.append([tensor.clone() for tensor in value])
            return value
        return self.messages.pop(0)


def network(seed: int) -> nn.Module:
    """Return a module with large and small tensors of several dtypes, with empty and non-contiguous tensors."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [
        nn.Linear(700, 1100),
        nn.BatchNorm2d(5),
        nn.Conv2d(300, 400, 3),
        nn.Linear(3, 4).double(),
    ]
    module = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    module.register_buffer("empty", torch.empty(0, 3))
    module.register_buffer("halves", torch.randn(2 * PIECE_BYTES).half().t())
    module.register_buffer("count", torch.tensor(seed))
    return module


def test_every_rank_gets_rank_zeros_state_in_small_messages() -> None:
    first, second, group = network(1), network(2), Group()
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    take_state_of_rank_zero(first, group)  # type: ignore[arg-type]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in tensors) for tensors in group.messages]
    assert max(sizes) <= PIECE_BYTES
    assert len(sizes) <= sum(sizes) / PIECE_BYTES * 2 + 1  # Small tensors share a message.
    group.rank = 1
    take_state_of_rank_zero(second, group)  # type: ignore[arg-type]
    for name, tensor in expected.items():
        assert torch.equal(second.state_dict()[name], tensor), name
        assert torch.equal(first.state_dict()[name], tensor), name
