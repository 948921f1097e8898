"""Tests of a program that all ranks run as on one device, with a network whose stages are on different ranks."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import GlooLink, Places
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.runtime.generator_states import GeneratorStates
from tests.pipeline.test_whole_batch import Residual, contrastive, views
from tests.runner.ranks import run_ranks

STEPS = 3
CPU = torch.device("cpu")
# Number of replicas of each stage, by the cuts of a Residual network.
LAYOUTS = {("first.0", "second"): [(1, 1, 1)]}
MORE_LAYOUTS = {("first",): [(2, 1), (2, 2), (3, 1)]}


@contextmanager
def placed(
    network: nn.Module, cuts: Sequence[str], replicas: tuple[int, ...], places: Places, microbatches: int = 3
) -> Iterator[PlacedNetwork]:
    """Divide a network in a context in which this rank follows the rules."""
    transport = Transport(Placement(replicas, microbatches=microbatches), timedelta(minutes=1))
    placed_network = PlacedNetwork(network, list(cuts), places, transport, AHEAD)
    vars(network)["forward"] = placed_network
    with places:
        yield placed_network


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
            small = self.network(left.detach()[:, :, 1:7, 1:7])  # Crops of another size.
            loss = loss + small["embedding"].square().mean()
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

    def result(self, read: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], list[float], list[Any]]:
        """Return the parameters, the values that the program has read, and the shapes of hooked gradients."""
        return {n: read(p.detach()) for n, p in self.network.named_parameters()}, self.read, sorted(self.hooked)


class Experts(nn.Module):
    """A layer whose input chooses one of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.positive(x) if x.sum() > 0 else self.negative(x)


class Chosen(nn.Module):
    """A network that does not use all its parameters for each batch, and returns a detached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = Experts(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.experts(x)
        return self.head(x.mean((2, 3))), x.detach()


def chosen() -> Chosen:
    torch.manual_seed(1)
    return Chosen().double()


def train_experts(network: nn.Module) -> list[Any]:
    """Return the names of the parameters with a gradient in each step, and values."""
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    results: list[Any] = []
    for sign in (1, 1, -1, -1, 1):
        images = (sign * views()[0].abs()).requires_grad_()
        logits, features = network(images)
        assert not features.requires_grad
        loss = (logits.square().mean() + features.mean()) * 2
        # The first gradient is for an adversarial image.
        (gradient,) = torch.autograd.grad(loss, images, retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append([name for name, parameter in network.named_parameters() if parameter.grad is not None])
        results += [loss.item(), float(gradient.norm())]
    return results


class Noise(nn.Module):
    """A layer that draws random numbers from one of three generators."""

    def __init__(self, kind: str, amount: float = 0.5) -> None:
        super().__init__()
        self.kind, self.amount = kind, amount

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.amount:
            return x
        if self.kind == "cpu":
            return nn.functional.dropout(x, self.amount)
        return x * (random.random() if self.kind == "python" else float(np.random.random()))


def noisy(amount: float = 0.5) -> nn.Sequential:
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Noise("cpu", amount))
    return nn.Sequential(
        first, Noise("python", amount), Noise("numpy", amount), nn.Conv2d(4, 2, 1), Noise("cpu", amount)
    ).double()


def call_noisy(network: nn.Module, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[Any]:
    """Return the results of calls, and digests of the generators' states after them."""
    results: list[Any] = []
    for training in (True, True, False, True):
        output = network.train(training)(views()[0])
        if training:
            output.sum().backward()
        results += [read(output.detach()), GeneratorStates.current(CPU).digest(("python", "numpy"))]
    return [*results, *(read(buffer) for buffer in network.buffers())]


def run_all(cuts: Sequence[str], replicas: tuple[int, ...]) -> list[Any]:
    """Run all programs on a rank of a pipeline."""
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    program = Program()
    parameters = list(program.network.parameters())
    with placed(program.network, cuts, replicas, places) as network:
        if places.rank in network.ranks[-1]:
            places.mark(program.scale, network.ranks[-1], "scale")
        else:
            places.put_away(program.scale, network.ranks[-1], "scale")
        program.run()
        with pytest.raises(RefusedError, match="no samples"):
            program.network(views()[0][:0])
        results: list[Any] = [program.result(places.everywhere)]
    assert all(now is then for now, then in zip(program.network.parameters(), parameters, strict=True))
    if len(replicas) == 2:
        results += more_programs(replicas, places)
    places.messages.close()
    return results


def more_programs(replicas: tuple[int, ...], places: Places) -> list[Any]:
    """Run the programs of networks for two stages."""
    experts = chosen()
    with placed(experts, ["experts"], replicas, places):
        results: list[Any] = [train_experts(experts)]
    network = noisy()
    with placed(network, ["0"], replicas, places) as placed_network:
        placed_network.runner.microbatches = 1
        results.append(call_noisy(network, places.everywhere))
    network = noisy()
    with placed(network, ["0"], replicas, places):
        results.append(call_noisy(network, places.everywhere))
    network = noisy(0.0)
    with placed(network, ["0"], replicas, places):
        results.append(begin_to_draw(network, places))
    return results


def begin_to_draw(network: nn.Module, places: Places) -> list[Any]:
    """Let a network draw random numbers that has not drawn before. Return digests of the generators' states."""
    digests, outputs = [], []
    for amount in (0.0, 0.5, 0.5):
        for module in network.modules():
            if isinstance(module, Noise):
                module.amount = amount
        images = views()[0][:1].expand(7, -1, -1, -1)
        calls = [network(images) for _ in range(2)]
        digests.append(GeneratorStates.current(CPU).digest(("python", "numpy")))
        sum(output.sum() for output in calls).backward()
        outputs += [places.everywhere(output.detach()) for output in calls]
    for index, output in enumerate(outputs[2:]):
        assert not any(torch.equal(output, other) for other in outputs[2:][:index])
        # The first rows of the second and of the third microbatch have equal images.
        assert not torch.equal(output[3], output[5])
    assert digests[0] == digests[1] != digests[2]
    return digests


class Normalised(nn.Module):
    """A network whose own code reads its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return x if self.training else 2 * x


def evaluated_after_training(network: nn.Module) -> Tensor:
    """Return the network's result in evaluation mode, after a step in training mode."""
    network(views()[0]).square().mean().backward()
    with torch.no_grad():
        result: Tensor = network.eval()(views()[1])
    return result


def evaluated_in_stages() -> Tensor:
    """Run `evaluated_after_training` on a rank of a pipeline whose second stage has running statistics."""
    places = Places(dist.get_rank(), 2, GlooLink(dist.new_group([0, 1]), dist.get_rank(), 2))
    torch.manual_seed(0)
    network = Normalised().double()
    with placed(network, ["conv"], (1, 1), places, microbatches=1):
        result = places.everywhere(evaluated_after_training(network))
    places.messages.close()
    return result


def check_equal(value: Any, expected: Any) -> None:
    """Check that nested containers are equal, tensors and numbers with a tolerance of 1e-12."""
    if isinstance(expected, (Tensor, float)):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    elif isinstance(expected, (list, tuple)):
        for part, expected_part in zip(value, expected, strict=True):
            check_equal(part, expected_part)
    elif isinstance(expected, dict):
        check_equal(sorted(value.items()), sorted(expected.items()))
    else:
        assert value == expected


def check_layouts(layouts: Mapping[tuple[str, ...], Sequence[tuple[int, ...]]]) -> None:
    program = Program()
    program.run()
    expected = [program.result(lambda tensor: tensor), train_experts(chosen()), call_noisy(noisy())]
    first: dict[int, list[Any]] = {}  # The rows of a microbatch follow from the number of replicas of the first stage.
    for cuts, replicas in ((cuts, replicas) for cuts, choices in layouts.items() for replicas in choices):
        for results in run_ranks(sum(replicas), run_all, cuts, replicas):
            check_equal(results[:3], expected[: len(results)])
            # It does not matter which rank of another stage runs a microbatch.
            known = first.setdefault(replicas[0], results[3:])
            check_equal(results[3:], known[: len(results[3:])])


def test_a_network_with_running_statistics_may_have_other_code_in_evaluation() -> None:
    """The network is traced again in its first evaluation. The trace sends no messages about the statistics."""
    torch.manual_seed(0)
    expected = evaluated_after_training(Normalised().double())
    for result in run_ranks(2, evaluated_in_stages):
        check_equal(result, expected)


def test_all_ranks_run_the_programs_of_one_device() -> None:
    check_layouts(LAYOUTS)


@pytest.mark.cluster
def test_all_ranks_run_the_programs_of_one_device_with_other_replicas() -> None:
    check_layouts(MORE_LAYOUTS)
