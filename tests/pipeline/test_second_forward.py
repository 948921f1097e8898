"""Tests of forwards that run again for the backward, so that their activations need not be kept."""

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.pipeline.whole_batch import CallArguments
from cnnstrategies.placed import GlooLink, Places
from cnnstrategies.runtime.generator_states import GeneratorStates
from tests.runner.ranks import run_ranks

F64, CPU = torch.float64, torch.device("cpu")
MICROBATCHES, SAMPLES, STEPS = 3, 6, 2


class Layer(nn.Module):
    """A layer that does everything that a second forward must not do twice."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.center: Tensor
        self.register_buffer("center", torch.zeros(4, 1, 1))
        self.calls, self.temperature = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.conv(x)), 0.3, self.training)
        x = torch.tanh(x * self.temperature) * random.uniform(0.8, 1.2)
        self.kl = self.conv.weight.square().sum() + x.square().mean()
        result = x - self.center
        self.center.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3), keepdim=True)[0])
        self.calls += 1
        return result


class Shifting(nn.Module):
    """A layer that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class Storing(nn.Module):
    """A layer that stores a term with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.term = x.square().mean()
        return x


class Program:
    """A program with stored terms and hooks, which changes the modules between the forward and the backward."""

    def __init__(self, first: type[nn.Module] = nn.Identity) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.module = nn.Sequential(nn.Sequential(first(), Layer(3)), Layer(4), Layer(4)).double()
        self.layers: list[Layer] = [self.module[0][1], self.module[1], self.module[2]]  # type: ignore[index, list-item]
        self.hooked = 0
        self.penalties: list[Tensor] = []

    def hook(self, layer: Layer, inputs: Any, output: Tensor) -> Tensor:
        """Store a penalty, count, and return another output."""
        self.penalties.append(output.abs().mean())
        self.hooked += 1
        return output * 1.1

    def step(self, network: Any, images: Tensor) -> Tensor:
        """Return the loss of a batch. Afterwards the modules' state is another one than in the forward."""
        handles = [layer.register_forward_hook(self.hook) for layer in self.layers]
        output = network(images)
        for handle in handles:
            handle.remove()
        loss: Tensor = output.square().mean() + 0.1 * torch.stack(self.penalties).square().sum()
        self.penalties.clear()
        for layer in self.layers:
            loss = loss + 0.01 * layer.kl
            layer.temperature = 3.0
        self.module.eval()
        return loss

    def train(self, network: Any, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[Any]:
        """Train, and return all values that must not depend on how activations are kept."""
        optimizer = torch.optim.SGD(self.module.parameters(), 0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        result: list[Any] = []
        for _ in range(STEPS):
            self.module.train()
            for layer in self.layers:
                layer.temperature = 1.0
            images = torch.randn(SAMPLES, 3, 4, 4, dtype=F64, generator=generator)
            loss = self.step(network, images)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            result += [read(loss.detach()), GeneratorStates.current(CPU).digest(("python", "numpy")), self.hooked]
            result += [layer.calls for layer in self.layers]
        assert [layer.temperature for layer in self.layers] == [3.0] * 3
        return [*result, *(read(tensor.detach()) for tensor in self.module.state_dict().values())]


class Saved:
    """A tensor that autograd has saved for a backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # The tensor's graph would keep this object, and so itself.


def divide(module: nn.Module, replicas: tuple[int, ...], checkpointing: Any, places: Places) -> PlacedNetwork:
    transport = Transport(Placement(replicas, microbatches=MICROBATCHES), timedelta(minutes=1))
    network = PlacedNetwork(module, ["0", "1"][: len(replicas) - 1], places, transport, AHEAD)
    network.runner.activation_checkpointing = checkpointing
    return network


def count_kept(replicas: tuple[int, ...], checkpointing: Any, places: Places) -> tuple[int, int]:
    """Return the number of tensors that are saved between forward and backward, and the most at any time."""
    alive: WeakSet[Saved] = WeakSet()
    most = 0

    def pack(tensor: Tensor) -> Saved:
        nonlocal most
        saved = Saved(tensor)
        alive.add(saved)
        most = max(most, len(alive))
        return saved

    layers = [
        nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(), nn.Tanh(), Storing())
        for _ in range(3)
    ]
    module = nn.Sequential(*layers).double()
    network = divide(module, replicas, checkpointing, places)
    images = torch.randn(SAMPLES, 3, 4, 4, dtype=F64)
    with places:
        network(images).sum().backward()
        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = network(images)
            between = len(alive)
            output.sum().backward()
    assert not alive
    return between, most


def train_stage(replicas: tuple[int, ...]) -> list[Any]:
    """Train with each way of keeping activations on a rank of a pipeline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = Places(rank, size, GlooLink(dist.new_group(range(size)), rank, size))
    results: list[Any] = []
    for checkpointing, microbatches in (("never", 3), ("except_last", 3), ("always", 3), ("always", 1)):
        program = Program()
        network = divide(program.module, replicas, checkpointing, places)
        network.runner.microbatches = microbatches
        with places:
            results.append(program.train(network, places.everywhere))
    results += [count_kept(replicas, checkpointing, places) for checkpointing in ("never", "except_last", "always")]
    places.messages.close()
    return results


def assert_same(values: list[Any], expected: list[Any], limit: float) -> None:
    for value, other in zip(values, expected, strict=True):
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, other, rtol=limit, atol=limit)
        else:
            assert value == other


def check_layout(replicas: tuple[int, ...]) -> None:
    program = Program()
    expected = program.train(program.module)
    placement = Placement(replicas, microbatches=MICROBATCHES)
    for rank, (never, except_last, always, whole, *kept) in enumerate(run_ranks(sum(replicas), train_stage, replicas)):
        assert_same(except_last, never, 0)
        assert_same(always, never, 0)
        assert_same(whole, expected, 1e-12)
        count = len(placement.microbatches_of(rank))
        of_one = kept[0][0] // count
        assert of_one > 5
        assert kept == [(count * of_one, count * of_one), (of_one, min(count, 2) * of_one), (0, of_one)]


def test_a_second_forward_changes_nothing() -> None:
    check_layout((1, 1))


@pytest.mark.cluster
def test_a_second_forward_changes_nothing_with_replicas() -> None:
    check_layout((2, 1))


class Drawing(nn.Module):
    """A layer with a random number generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand((), dtype=F64, generator=self.generator)


def run_unusual() -> tuple[list[str], list[Tensor]]:
    """Run programs that change what a second forward needs, in one stage. Return error messages, and gradients."""
    places = Places(0, 1, GlooLink(dist.new_group([0]), 0, 1))
    messages: list[str] = []
    gradients: list[Tensor] = []
    changes: list[tuple[type[nn.Module], Callable[[Program, Tensor], Any]]] = [
        (nn.Identity, lambda program, images: program.layers[1].conv.weight.mul_(2)),
        (nn.Identity, lambda program, images: images.add_(1)),
        (Drawing, lambda program, images: None),
    ]
    for first, change in changes:
        program = Program(first)
        network = divide(program.module, (1,), "always", places)
        with places:
            for _ in range(2):
                images = torch.ones(SAMPLES, 3, 4, 4, dtype=F64)
                loss = network(images).square().sum()
                with torch.no_grad():
                    change(program, images)
                try:
                    loss.backward()
                except ConfigurationError as error:
                    messages.append(str(error))
                    break
    transport = Transport(Placement((1,), microbatches=MICROBATCHES), timedelta(minutes=1))
    for checkpointing in ("never", "always"):
        torch.manual_seed(0)
        module = nn.Sequential(Shifting(), nn.Conv2d(3, 2, 1)).double()
        runner = StageRunner(Division(module, []), transport, AHEAD)
        runner.watch(module, places, [(0,)])
        runner.activation_checkpointing = checkpointing
        for _ in range(2):
            images = torch.randn(SAMPLES, 3, 4, 4, dtype=F64)
            batch = runner.begin(CallArguments(images, SAMPLES, True))
            assert batch.header is not None
            sums, _ = batch.backward(batch.outputs(batch.header))
            gradients += [gradient for gradient in sums if gradient is not None]
    return messages, gradients


def test_a_forward_that_cannot_be_repeated_is_refused() -> None:
    ((messages, gradients),) = run_ranks(1, run_unusual)
    starts = (
        "the parameter 1.conv.weight was changed",
        "the images were changed",
        "a forward of stage 0 has given other",
    )
    assert len(messages) == len(starts), messages
    for message, start in zip(messages, starts, strict=True):
        assert message.startswith(start)
        assert message.endswith("set activation_checkpointing to never")
    middle = len(gradients) // 2
    assert middle == 4
    for gradient, other in zip(gradients[:middle], gradients[middle:], strict=True):
        assert torch.equal(gradient, other), "a network may change its images in place"
