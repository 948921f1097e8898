"""Tests of calls whose backwards run between their forwards, because the module declares its loss."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.declared_loss import DeclaredLoss
from cnnstrategies.pipeline.gradient_check import GradientVerdict, begin_comparison
from cnnstrategies.pipeline.loss_arguments import LossArguments, UnknownArgumentError
from cnnstrategies.pipeline.loss_verdict import settle_late
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import GlooLink, Places
from tests.pipeline.test_placed_network import check_equal
from tests.runner.ranks import run_ranks

SAMPLES = 7
MICROBATCHES = 4
CLASSES = 3
CUTS = ("first", "second")
HOST = torch.device("cpu")


class Token:
    """An object that lives as long as the autograd graph of one forward."""


ALIVE: WeakSet[Token] = WeakSet()
PEAKS = array("q")  # A list would be a value that forwards store.


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        ALIVE.add(ctx.token)
        PEAKS.append(len(ALIVE))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Part(nn.Module):
    """A convolution whose graphs are counted."""

    def __init__(self, channels: int, inside: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.conv = inside(nn.Conv2d(channels, 4, 3, padding=1))
        self.is_constant = False  # Whether the convolution's parameters get no gradient.

    def forward(self, x: Tensor) -> Tensor:
        constants = {name: parameter.detach() for name, parameter in self.conv.named_parameters()}
        x = torch.func.functional_call(self.conv, constants, x) if self.is_constant else self.conv(x)
        x = x.relu()
        return _Mark.apply(x) if x.requires_grad else x  # type: ignore[no-any-return, no-untyped-call]


class Drawing(nn.Module):
    """A layer with a random draw, and a buffer that each forward changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + 0.1 * torch.rand(x.shape[1:], dtype=x.dtype)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


class Program(nn.Module):
    """A module that declares its loss. The names of its programs are those of its methods."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Sequential(Part(3, spectral_norm), Drawing()) if mixes else Part(3)
        self.net = nn.Sequential()
        for name, layer in (("first", first), ("second", Part(4)), ("head", Head())):
            self.net.add_module(name, layer)
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.double()
        self.read: list[float] = []
        self.lost: list[int] = []
        self.peaks: list[int] = []  # For each step, the largest number of graphs that were alive.
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.lost.append(len(outputs))  # One call for each batch: calls for microbatches leave no trace.
        return nn.functional.cross_entropy(outputs @ self.proxies, targets)

    def run(self, name: str, step: Callable[[Any], Any], give: Callable[[Tensor], Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for number in range(4):
            # The third batch is smaller.
            x = torch.randn(SAMPLES - 2 * (number == 2), 3, 6, 6, dtype=torch.float64, generator=generator)
            batch = give(x), give(torch.randint(CLASSES, (len(x),), generator=generator))
            self.optimizer.zero_grad()
            del PEAKS[:]
            with step(batch):
                loss = getattr(self, name)(batch, number)
            self.peaks.append(max(PEAKS, default=0))
            if loss is not None:
                loss.backward()
                self.read.append(float(loss))
            nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            self.optimizer.step()

    def plain(self, batch: Any, number: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def doubled(self, batch: Any, number: int) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        return 2 * self.plain(batch, number) + 0.01 * penalty

    def images(self, batch: Any, number: int) -> Tensor:
        """Change the images by their own gradient."""
        x = batch[0].requires_grad_()
        (gradient,) = torch.autograd.grad(self.plain(batch, number), x)
        return self.loss(self.net(x.detach() + gradient.sign()), batch[1])

    def twice(self, batch: Any, number: int) -> Tensor:
        """Run two backwards through one call."""
        loss = self.plain(batch, number)
        gradients = torch.autograd.grad(loss, [*self.net.parameters()], retain_graph=True)
        return 3 * loss + sum((p * g).sum() for p, g in zip(self.net.parameters(), gradients, strict=True))

    def constant(self, batch: Any, number: int) -> Tensor:
        """Give the parameters of a layer no gradient in the second step, which differs from a gradient of zero."""
        self.net.second.is_constant = number == 1  # type: ignore[union-attr, assignment]
        return self.plain(batch, number)

    def two_calls(self, batch: Any, number: int) -> Tensor:
        return self.plain(batch, number) + 0.5 * self.loss(self.net(batch[0].flip(-1)), batch[1])

    def accumulated(self, batch: Any, number: int) -> Tensor:
        self.plain(batch, number).div(4).backward()
        return self.plain(batch, number)

    def tiny(self, batch: Any, number: int) -> Tensor:
        """Add a small term in later steps."""
        outputs = self.net(batch[0])
        loss = self.loss(outputs, batch[1])
        return loss + 1e-9 * outputs.square().sum() if number > 2 else loss

    def later(self, batch: Any, number: int) -> Tensor:
        """Train another loss in later steps."""
        outputs = self.net(batch[0])
        loss = self.loss(outputs, batch[1])
        return outputs.square().mean() if number > 2 else loss

    def other_targets(self, batch: Any, number: int) -> Tensor:
        """Give the loss other targets in later steps."""
        return self.loss(self.net(batch[0]), batch[1].roll(1) if number > 2 else batch[1])

    def other_values(self, batch: Any, number: int) -> Tensor:
        """Change the targets in place in later steps."""
        outputs = self.net(batch[0])
        if number > 2:
            batch[1].copy_(batch[1].roll(1))
        return self.loss(outputs, batch[1])

    def infinite(self, batch: Any, number: int) -> Tensor | None:
        """Skip a step whose gradients are not finite."""
        loss = self.plain(batch, number)
        if number == 3:
            (loss * float("inf")).backward()
            self.optimizer.zero_grad()
            return None
        return loss

    def result(self, read: Callable[[Tensor], Tensor]) -> list[Any]:
        state = {name: read(tensor.detach()) for name, tensor in self.state_dict(keep_vars=True).items()}
        return [state, self.read, self.lost]


# Programs, and the reason why they end in the order of GPipe.
PROGRAMS = {
    "plain": None,
    "doubled": None,
    "images": None,
    "twice": None,
    "constant": None,
    "two_calls": None,
    "accumulated": None,
    "infinite": None,
    "tiny": "in other ways than by one call of loss()",
    "later": "does not train what loss() returns",
    "other_targets": "that it has computed itself",
    "other_values": "for its microbatches differ",
}


def train(
    name: str,
    replicas: Sequence[int],
    places: Places,
    declares: bool = True,
    mixes: bool = False,
    device: torch.device = HOST,
) -> Any:
    """Run a program on a rank. Return the results, why the order is GPipe's, and the numbers of graphs.

    The stages run ahead if the program mixes samples. On a device that is not the CPU, backwards do not wait for it.
    """
    program = Program(mixes).to(device)
    transport = Transport(Placement(tuple(replicas), microbatches=MICROBATCHES), timedelta(minutes=1), device)
    placed = PlacedNetwork(program.net, CUTS[: len(replicas) - 1], places, transport, AHEAD, program)
    vars(program.net)["forward"] = placed
    places.set_place(program.proxies, placed.ranks[-1], "proxies")
    if declares:
        late = device != HOST
        placed.declared = DeclaredLoss(program, places, placed.ranks[-1], saves_memory=mixes, settles_late=late)
    declared, placed.runner.run_ahead = placed.declared, mixes

    @contextmanager
    def step(batch: Any) -> Iterator[None]:
        placed.window_ends, placed.calls = True, 0
        with nullcontext() if declared is None else declared.step(batch):
            yield

    torch.manual_seed(2)
    with places:
        program.run(
            name,
            step,
            lambda tensor: places.give(tensor.to(device), placed.ranks[0], "the batch"),
        )
        settle_late(places, placed.ranks[-1], declared)
        result = program.result(lambda tensor: places.everywhere(tensor).to(HOST))
    return result, None if declared is None else declared.reason, program.peaks


def train_all(replicas: Sequence[int], names: Sequence[str]) -> list[Any]:
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    results = [train(name, replicas, places) for name in names]
    # One device draws other numbers, so this program is compared with the order of GPipe.
    results += [train("later", replicas, places, declares, mixes=True) for declares in (True, False)]
    places.messages.close()
    return results


def on_one_device(name: str) -> list[Any]:
    program = Program()
    program.run(name, nullcontext, lambda tensor: tensor)
    return program.result(lambda tensor: tensor)


def check_layout(replicas: Sequence[int], names: Sequence[str]) -> None:
    on_ranks = run_ranks(sum(replicas), train_all, replicas, names)
    for rank, (*results, interleaved, gpipe) in enumerate(on_ranks):
        for name, (result, reason, _) in zip(names, results, strict=True):
            check_equal(result, on_one_device(name))
            assert reason is PROGRAMS[name] or PROGRAMS[name] in reason, (name, reason)
        check_equal(interleaved[0], gpipe[0])
        stage = Placement(tuple(replicas)).place(rank).stage
        if set(replicas) == {1} and stage < len(CUTS):
            few = len(replicas) - stage
            assert results[0][2][1::2] == [few] * 2, "few microbatches have graphs at a time"
            assert gpipe[2][1::2] == [MICROBATCHES] * 2
            assert interleaved[2][0] < MICROBATCHES <= gpipe[2][0], "the first step saves memory"
            assert interleaved[2][1] == few + (few > 1), "one more if the stages run ahead"


QUICK = ("doubled", "images", "constant", "infinite", "tiny", "other_values")
OTHERS = [name for name in PROGRAMS if name not in QUICK]


def test_steps_train_as_on_one_device_and_store_the_activations_of_few_microbatches() -> None:
    check_layout((1, 1), QUICK)


@pytest.mark.cluster
@pytest.mark.parametrize(("replicas", "names"), [((1, 1), OTHERS), ((2, 1), [*PROGRAMS])], ids=["1-1", "2-1"])
def test_more_steps_train_as_on_one_device_with_replicas(replicas: tuple[int, ...], names: Sequence[str]) -> None:
    """``make test-cases`` tests more layouts; see `more_layouts.py`."""
    check_layout(replicas, names)


def compare(*arguments: Any) -> GradientVerdict:
    """Compare gradients, and read the result. The arguments are those of `begin_comparison`."""
    begun = begin_comparison(*arguments)
    return begun if isinstance(begun, GradientVerdict) else begun.read()


def compared(
    arrived: Tensor, expected: Tensor, of_loss: float = 1.0, through: Tensor | None = None, scale: float = 1.0
) -> GradientVerdict:
    through = arrived if through is None else through
    return compare([arrived], [through], torch.tensor(of_loss), scale, lambda: [(arrived, expected)])


@pytest.mark.light
def test_gradients_are_those_of_the_declared_loss_up_to_a_factor() -> None:
    expected = torch.randn(4, 3)
    assert compared(expected, expected) == GradientVerdict("factor", 1.0)
    assert compared(3 * expected, 2 * expected, of_loss=3.0, scale=2.0) == GradientVerdict("factor", 1.5)
    assert compared(0 * expected, expected, of_loss=0.0) == GradientVerdict("factor", 0.0)
    tiny = expected + 1e-6 * expected.abs()
    assert compared(tiny, expected, through=expected).kind == "different", "a term that does not come from the loss"
    assert compared(expected * (1 + 1e-6), expected).kind == "factor", "rounding"
    assert compared(expected + 1e-4, expected).reason.endswith("so loss() is not a mean over samples")
    assert compared(2 * expected, expected).kind == "different"
    assert compared(expected / 0, expected).kind == compared(expected, expected, float("inf")).kind == "infinite"
    half, other = expected.bfloat16(), (expected * (1 + 2**-9)).bfloat16()
    assert compared(half, other).kind == "factor"
    assert compared(half, half + 0.1).kind == "different"
    # Small gradients may be differences of numbers of the size 1 / n, which are rounded.
    small = 1e-4 * expected.clamp(-1, 1)
    assert compared(small + 1e-7, small).kind == "factor"
    assert compared(small + 1e-6, small).kind == "different"
    number = torch.ones(())
    assert compare([None], [None], number, 1.0, lambda: [(None, expected)]).kind == "different"
    assert compare([expected], [None], number, 1.0, list).kind == "different"


@pytest.mark.light
def test_arguments_of_the_loss_are_results_and_tensors_of_the_batch() -> None:
    outputs, batch = [torch.randn(4, 2), torch.randn(4)], [torch.randn(4, 3), torch.arange(4), "name"]
    arguments = LossArguments.of((outputs[0],), {"targets": {"y": batch[1]}, "weight": 0.5}, outputs, batch, 4)
    assert arguments.in_batch == [1]
    args, kwargs = arguments.fill([outputs[1]], {1: batch[0]})
    assert args == (outputs[1],)
    assert kwargs == {"targets": {"y": batch[0]}, "weight": 0.5}
    assert arguments.targets({1: batch[0]}) == {"y": batch[0]}
    assert arguments.are_in(batch, 4)
    assert not arguments.are_in(batch, 5)
    assert not arguments.are_in(batch[:1], 4)
    for argument, message in (
        (batch[1] + 1, "shape .4,. that it has computed itself"),
        (object(), "an object of the class object"),
    ):
        with pytest.raises(UnknownArgumentError, match=message):
            LossArguments.of((outputs[0], argument), {}, outputs, batch, 4)
    with pytest.raises(UnknownArgumentError, match="does not have one row for each of 3 samples"):
        LossArguments.of((outputs[0], batch[1]), {}, outputs, batch, 3)
