"""Tests of a stage's transfers: how many are under way at once, and how devices are sent."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.pipeline.channels import MOST_EVALUATION_SENDS, Channels
from cnnstrategies.pipeline.tensor_headers import pack
from cnnstrategies.pipeline.timetable import Placement, RankPlace, Task, turns
from cnnstrategies.pipeline.transport import Pending

TURN = turns((1, 1), 20, "1f1b")


class SlowTransport:
    """A transport that holds each tensor until its ``wait``, like a slow link.

    Args:
        stage: Stage of the rank.
    """

    device = torch.device("cpu")
    placement = Placement((1, 1), microbatches=20)

    def __init__(self, stage: int = 1) -> None:
        self.rank, self.place = stage, RankPlace(stage, 0)
        self.under_way: list[Tensor] = []
        self.most = 0

    def send(self, tensor: Tensor, target: int, tag: int, content: str) -> Any:
        self.under_way.append(tensor)
        self.most = max(self.most, len(self.under_way))
        return SimpleNamespace(begin=lambda: None, wait=lambda: self.under_way.pop(0))

    def send_object(self, value: Any, target: int, content: str) -> list[Any]:
        return [self.send(wire, target, 0, content) for wire in value[1]]

    def receive(self, tensor: Tensor, source: int, tag: int, content: str) -> Any:
        return Pending(lambda: SimpleNamespace(wait=lambda: None), tensor.fill_(1), nullcontext)  # type: ignore[arg-type, return-value]


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


def sender() -> tuple[Channels, Any]:
    """Return the channels of a first stage that sends one tensor for each microbatch, and their transport."""
    transport: Any = SlowTransport(0)
    graph: Any = SimpleNamespace(names_from={}, names_to={1: ["x"]})
    return Channels(graph, TURN, transport, ask_for_all=False), transport


def test_sent_activations_are_kept_only_until_their_gradients_arrive() -> None:
    channels, transport = sender()
    channels.plan([Task("backward", 0, microbatch) for microbatch in range(3)], lambda _: "a size")
    for microbatch in range(3):
        channels.send_forward(microbatch, "a size", {"x": torch.zeros(2, requires_grad=True)}, training=True)
    channels.exchange(0, math.inf)
    for microbatch in range(3):
        assert len(transport.under_way) == 3 - microbatch
        (gradients,) = channels.receive_backward(microbatch).values()
        assert len(gradients) == 1
    assert not transport.under_way


def test_evaluation_does_not_keep_the_activations_of_all_microbatches() -> None:
    channels, transport = sender()
    for microbatch in range(20):
        channels.send_forward(microbatch, "a size", {"x": torch.zeros(2)}, training=False)
    assert transport.most == MOST_EVALUATION_SENDS + 1


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
