"""Tests of values that a network's forward stores on modules, and of stages that mix the samples of a batch."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_apart, run_ranks
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import AHEAD
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import GlooLink, Places

STEPS, SAMPLES = 3, 10
F64 = torch.float64


class Layer(nn.Module):
    """A convolution whose result the subclasses use."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x))


class Bayesian(Layer):
    """A layer that stores a penalty of its weights and a penalty of its activations, each with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kl = self.conv.weight.square().sum() + x.square().mean()
        self.total = x.exp().sum()
        return x


class Accumulating(Layer):
    """A layer that adds to values that the step has set to zero, and counts samples and calls."""

    seen, calls = 0, 0

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.norms = torch.zeros((), dtype=F64)
        self.shared: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.norms += x.square().sum()
        self.seen += len(x)
        self.calls += 1
        self.shared["total"] = self.shared.get("total", 0) + x.mean()
        return x


class Keeping(Layer):
    """A layer that stores rows, in an attribute and in a nested value."""

    def forward(self, x: Tensor) -> Tensor:
        self.before = x
        x = super().forward(x)
        self.after = {"maps": x, "means": (x.mean((2, 3)), "means")}
        return x


class Centred(Layer):
    """A layer with a buffer that its forward uses and then updates, and a counter."""

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.register_buffer("center", torch.zeros(4, 1, 1, dtype=F64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.center: Tensor
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        result = x - self.center
        self.center.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3), keepdim=True)[0])
        self.seen += len(x)
        return result


class UpdatedFirst(Centred):
    """A layer with a buffer that its forward updates and then uses."""

    def forward(self, x: Tensor) -> Tensor:
        x = Layer.forward(self, x)
        self.center = self.center * 0.5 + x.detach().mean((0, 2, 3), keepdim=True)[0]
        return x - self.center


class MinibatchDeviation(Layer):
    """A layer whose result depends on all samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.std(0).mean()


class Late(Layer):
    """A layer that stores a penalty from the third step on, and another kind of number before."""

    epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.epoch >= 2:
            self.penalty = x.abs().mean()
        return x


class Clamped(Layer):
    """A layer whose penalty is zero for all samples until the weights have grown."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = (x.abs() * 40 - self.level).relu().sum()
        return x

    level = 1e6


class Network(nn.Module):
    def __init__(self, kind: Callable[[int], Layer]) -> None:
        super().__init__()
        self.stem, self.middle, self.last = kind(3), kind(4), kind(4)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.last(self.middle(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Module(nn.Module):
    """The user's module. The steps of the cases are its methods."""

    def __init__(self, kind: Callable[[int], Layer]) -> None:
        super().__init__()
        self.net = Network(kind)
        self.penalties: list[Tensor] = []
        self.step = 0

    @property
    def layers(self) -> list[Any]:
        return [self.net.stem, self.net.middle, self.net.last]


def kl(module: Module, loss: Tensor) -> Tensor:
    for layer in module.layers:
        loss = loss + layer.kl * 0.3 + layer.total * 1e-4
    return loss


def kl_elsewhere(module: Module, loss: Tensor) -> Tensor:
    first, second, third = (layer.kl for layer in module.layers)
    return loss * (1 + first) + second.sqrt() * third


def accumulated(module: Module, loss: Tensor) -> Tensor:
    for layer in module.layers:
        assert layer.seen == SAMPLES * (module.step + 1)
        assert layer.calls == module.step + 1
        loss = loss + layer.norms / layer.seen + layer.shared["total"]
        layer.norms = torch.zeros((), dtype=F64)
        layer.shared.clear()
    return loss


def hooked(module: Module, loss: Tensor) -> Tensor:
    penalties = module.penalties
    assert len(penalties) == 3
    loss = loss + torch.stack(penalties).square().sum() + penalties[0] * penalties[2]
    penalties.clear()
    return loss


def kept(module: Module, loss: Tensor) -> Tensor:
    for layer in module.layers:
        assert len(layer.before) == SAMPLES
        assert layer.after["means"][1] == "means"
        similarity = layer.after["means"][0] @ layer.after["means"][0].T
        loss = loss + similarity.logsumexp(1).mean() + layer.before.std(0).sum() * layer.after["maps"].amax()
    return loss


def late(module: Module, loss: Tensor) -> Tensor:
    for layer in module.layers:
        if module.step >= 2:
            loss = loss + layer.penalty
        layer.epoch = module.step + 1
    return loss


def clamped(module: Module, loss: Tensor) -> Tensor:
    for layer in module.layers:
        loss = loss + layer.penalty * 1e-3
        layer.level = 1.0
    return loss


def unchanged(module: Module, loss: Tensor) -> Tensor:
    return loss


CASES: dict[str, tuple[type[Layer], Callable[[Module, Tensor], Tensor], bool]] = {
    "kl": (Bayesian, kl, False),
    "kl_elsewhere": (Bayesian, kl_elsewhere, False),
    "accumulated": (Accumulating, accumulated, False),
    "hooked": (Layer, hooked, False),
    "kept": (Keeping, kept, False),
    "late": (Late, late, False),
    "clamped": (Clamped, clamped, False),
    "centred": (Centred, unchanged, False),
    "updated_first": (UpdatedFirst, unchanged, True),
    "deviation": (MinibatchDeviation, unchanged, True),
}


def create(case: str) -> Module:
    torch.manual_seed(0)
    module = Module(CASES[case][0]).double()
    module.net.norm.eval()  # Otherwise the statistics of the microbatches would differ from those of the batch.
    if case == "hooked":
        for layer in module.layers:
            layer.register_forward_hook(lambda _, __, output: module.penalties.append(output.square().mean()))
    return module


def train(case: str, module: Module, network: Any) -> list[float]:
    """Train some steps, and return the losses."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for module.step in range(STEPS):
        images = torch.randn(SAMPLES, 3, 6, 6, dtype=F64, generator=generator)
        targets = torch.randint(3, (SAMPLES,), generator=generator)
        loss = nn.functional.cross_entropy(network(images), targets)
        loss = CASES[case][1](module, loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_stage(replicas: tuple[int, ...], cases: list[str]) -> dict[str, Any]:
    """Train all cases on a rank of a pipeline."""
    size = dist.get_world_size()
    cuts = ["stem", "middle"][: len(replicas) - 1]
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    transport = Transport(Placement(replicas, microbatches=3), timedelta(minutes=1))
    results = {}
    for case in cases:
        module = create(case)
        network = PlacedNetwork(module.net, list(cuts), places, transport, AHEAD, module)
        with places:
            losses = train(case, module, network)
            state = {name: places.everywhere(tensor.detach()) for name, tensor in module.net.state_dict().items()}
        results[case] = losses, state, network.one_microbatch
    places.messages.close()
    return results


def train_alone(cases: list[str]) -> dict[str, Any]:
    """Train all cases on one device."""
    modules = {case: create(case) for case in cases}
    return {case: (train(case, module, module.net), module.net.state_dict()) for case, module in modules.items()}


def compare(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for case, (losses, state) in expected.items():
        stage_losses, stage_state, reason = result[case]
        assert (reason is not None) == CASES[case][2], (case, reason)
        assert stage_losses == pytest.approx(losses, rel=1e-12), case
        for name, tensor in state.items():
            torch.testing.assert_close(stage_state[name], tensor, rtol=1e-12, atol=1e-12, msg=f"{case}: {name}")


def test_stored_values_are_those_of_the_whole_batch() -> None:
    expected = run_apart(train_alone, list(CASES))
    for replicas in ((1, 1), (1, 1, 1), (2, 1), (1, 2)):
        for result in run_ranks(sum(replicas), train_stage, replicas, list(CASES)):
            compare(result, expected)
