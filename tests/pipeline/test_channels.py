"""How much of a stage's traffic is under way at once."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.timetable import Placement


class SlowTransport:
    """Holds each tensor until it is waited for, as a slow link does."""

    def __init__(self) -> None:
        self.under_way: list[Tensor] = []
        self.most = 0

    def send(self, tensor: Tensor, target: int, tag: int, what: str) -> Any:
        self.under_way.append(tensor)
        self.most = max(self.most, len(self.under_way))
        return SimpleNamespace(wait=lambda: self.under_way.pop(0))


def test_gradients_that_a_slow_link_has_not_taken_do_not_pile_up() -> None:
    """Else 1f1b would hold what gpipe holds."""
    transport: Any = SlowTransport()
    division: Any = SimpleNamespace(routes=())
    channels = Channels(division, Placement((1, 1)), 1, transport, torch.device("cpu"), ask_for_all=False)
    for microbatch in range(20):
        channels.send_backward(microbatch, {0: [torch.zeros(3)]})
    assert transport.most == 3, "two of earlier microbatches, and this one's"
    channels.finish()
    assert transport.under_way == []
