"""Tests of a program that all ranks run as on one device, with a network whose stages are on different ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from test_whole_batch import Residual, contrastive, views
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import GlooLink, Places

STEPS = 3


class Program:
    """A program with a loss that compares samples, a branch on the loss, hooks, and gradients scaled by position."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = Residual().double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.hooked: list[tuple[int, ...]] = []
        for parameter in self.network.parameters():
            parameter.register_hook(lambda gradient: self.hooked.append(tuple(gradient.shape)))
        self.optimizer = torch.optim.SGD([*self.network.parameters(), self.scale], 0.1, momentum=0.9)
        self.read: list[float] = []

    def run(self) -> None:
        """Train."""
        for _ in range(STEPS):
            left, right = views()
            left.requires_grad_()
            loss = contrastive(self.network(left), self.network(right)) * self.scale
            loss = loss + 0.01 * sum(parameter.square().sum() for parameter in self.network.parameters())
            if loss.item() > 1:
                loss = loss * 0.5
            self.optimizer.zero_grad()
            loss.backward()
            for position, parameter in enumerate(self.network.parameters()):
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + position)
            nn.utils.clip_grad_norm_([*self.network.parameters(), self.scale], 1.0)
            self.optimizer.step()
            self.read.append(loss.item())
            assert left.grad is not None
            self.read.append(float(left.grad.norm()))


def run_program(cuts: list[str]) -> tuple[dict[str, Tensor], list[float], list[Any]]:
    """Run the program on a rank of a pipeline."""
    program = Program()
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    transport = Transport(Placement((1,) * size, microbatches=3), timedelta(minutes=1))
    parameters = list(program.network.parameters())
    network = PlacedNetwork(program.network, list(cuts), places, transport, AHEAD)
    vars(program.network)["forward"] = network
    if places.rank < size - 1:
        places.put_away(program.scale, (size - 1,), "scale")
    else:
        places.mark(program.scale, (size - 1,), "scale")
    with places:
        program.run()
        state = {name: places.everywhere(tensor.detach()) for name, tensor in program.network.named_parameters()}
    assert all(now is then for now, then in zip(program.network.parameters(), parameters, strict=True))
    places.messages.close()
    return state, program.read, program.hooked


def test_all_ranks_run_the_program_of_one_device() -> None:
    program = Program()
    program.run()
    for cuts in (["first"], ["first.0", "second"]):
        for state, read, hooked in run_ranks(len(cuts) + 1, run_program, cuts):
            torch.testing.assert_close(read, program.read, rtol=1e-12, atol=1e-12)
            assert sorted(hooked) == sorted(program.hooked)
            for name, parameter in program.network.named_parameters():
                torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-12, atol=1e-12)
