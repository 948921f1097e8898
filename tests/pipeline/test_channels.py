"""Tests of a stage's transfers: how many are under way at once, and how devices are sent."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.tensor_headers import pack
from cnnstrategies.pipeline.timetable import Placement, RankPlace, Task, turns

TURN = turns((1, 1), 20, "1f1b")


class SlowTransport:
    """A transport that holds each tensor until its ``wait``, like a slow link."""

    rank, place, device = 1, RankPlace(1, 0), torch.device("cpu")
    placement = Placement((1, 1), microbatches=20)

    def __init__(self) -> None:
        self.under_way: list[Tensor] = []
        self.most = 0

    def send(self, tensor: Tensor, target: int, tag: int, content: str) -> Any:
        self.under_way.append(tensor)
        self.most = max(self.most, len(self.under_way))
        return SimpleNamespace(wait=lambda: self.under_way.pop(0))

    def send_object(self, value: Any, target: int, content: str) -> list[Any]:
        return []


def test_unsent_gradients_on_a_slow_link_do_not_accumulate() -> None:
    """If unsent gradients accumulated, 1f1b would need as much memory as gpipe."""
    transport: Any = SlowTransport()
    graph: Any = SimpleNamespace(names_from={}, names_to={})
    channels = Channels(graph, TURN, transport, ask_for_all=False)
    leaf = torch.zeros(3)
    leaf.grad = torch.zeros(3)
    for microbatch in range(20):
        channels.send_backward(microbatch, {0: [leaf]})
    assert transport.most == 6, "gradients of three microbatches, each with a message that says which gradients exist"
    channels.finish()
    assert transport.under_way == []


def test_a_device_that_the_network_reads_is_the_device_of_each_stage() -> None:
    """Networks read a tensor's device, for example to make coordinates with `device=x.device`."""
    header, _ = pack((torch.device("cpu"), 3), ask_for_all=False)
    transport: Any = SlowTransport()
    transport.receive_object, transport.device = lambda source, content: (header, []), torch.device("meta")
    graph: Any = SimpleNamespace(names_from={0: ["device", "number"]}, names_to={})
    channels = Channels(graph, TURN, transport, ask_for_all=False)
    channels.plan([Task("forward", 1, 0)], lambda _: "a size")
    channels.exchange(TURN(Task("forward", 1, 0)), math.inf)
    values, _ = channels.receive_forward(0, "a size")
    assert values == {"device": torch.device("meta"), "number": 3}
