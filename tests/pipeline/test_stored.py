"""Tests of values that a network's forward stores on modules, and of stages that mix the samples of a batch."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.mixing import join
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.placed import GlooLink, Places, RefusedError
from tests.runner.ranks import run_ranks

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


class Annealed(Layer):
    """A layer with a buffer that its forward changes in place and then multiplies, so that the backward needs it."""

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones((), dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(0.5).add_(0.1)
        return super().forward(x) * self.scale


class MinibatchDeviation(Layer):
    """A layer whose result depends on all samples of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.std(0).mean()


class Late(Layer):
    """A layer that stores a penalty from the third step on."""

    epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.epoch >= 2:
            self.penalty = x.abs().mean()
        return x


class Clamped(Layer):
    """A layer whose penalty is zero for all samples until its level changes."""

    level = 1e6

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = (x.abs() * 40 - self.level).relu().sum()
        return x


class Network(nn.Module):
    def __init__(self, kinds: Sequence[type[Layer]]) -> None:
        super().__init__()
        first, second, third = kinds
        self.stem, self.middle, self.last = first(3), second(4), third(4)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.last(self.middle(self.stem(x))))
        return self.head(x.mean((2, 3)))


class NetworkWithTerm(Network):
    """A network that returns a term of the loss beside its result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, x.square().mean().sqrt()


class Module(nn.Module):
    """The user's module. Hooks of layers store values in it."""

    def __init__(self, kinds: Sequence[type[Layer]]) -> None:
        super().__init__()
        self.net = NetworkWithTerm(kinds) if Clamped in kinds[:1] else Network(kinds)
        self.layers: list[Any] = [self.net.stem, self.net.middle, self.net.last]
        self.step, self.hooked, self.total = 0, 0, torch.zeros((), dtype=F64)
        self.penalties: list[Tensor] = []
        kept: dict[str, Tensor] = {}
        self.kept = kept

        def keep(layer: nn.Module, inputs: Any, output: Tensor) -> None:
            kept[type(layer).__name__] = output.amax((1, 2, 3))

        for layer in self.layers:
            layer.register_forward_hook(self.hook)
            layer.register_forward_hook(keep)

    def hook(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.penalties.append(output.square().mean())
        self.total = self.total + output.exp().sum()
        self.hooked += 1

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the loss, with terms of what the layers and hooks have stored."""
        loss = torch.zeros((), dtype=F64)
        if isinstance(outputs, tuple):
            outputs, loss = outputs
        loss = loss + nn.functional.cross_entropy(outputs, targets)
        loss = loss + torch.stack(self.penalties).square().sum() + self.penalties[0] * self.penalties[2]
        loss = loss + self.total * 1e-4
        assert self.hooked == 3 * (self.step + 1)
        assert [*self.kept] == [type(layer).__name__ for layer in self.layers]
        for values in self.kept.values():
            loss = loss + values.std()
        self.penalties.clear()
        self.kept.clear()
        self.total = torch.zeros((), dtype=F64)
        for layer in self.layers:
            loss = self.with_terms_of(layer, loss)
        return loss

    def with_terms_of(self, layer: Any, loss: Tensor) -> Tensor:
        """Return the loss with the terms that a layer has stored."""
        match layer:
            case Bayesian():
                return loss * (1 + layer.kl * 0.1) + layer.kl.sqrt() * 0.1 + layer.total * 1e-4
            case Accumulating():
                assert layer.seen == SAMPLES * (self.step + 1)
                assert layer.calls == self.step + 1
                loss = loss + 0.1 * (layer.norms / layer.seen + layer.shared["total"])
                layer.norms = torch.zeros((), dtype=F64)
                layer.shared.clear()
            case Keeping():
                assert len(layer.before) == SAMPLES
                assert layer.after["means"][1] == "means"
                similarity = layer.after["means"][0] @ layer.after["means"][0].T
                return loss + similarity.logsumexp(1).mean() + layer.before.std(0).mean() * layer.after["maps"].amax()
            case Late():
                layer.epoch = self.step + 1
                return loss + layer.penalty if self.step >= 2 else loss
            case Clamped():
                layer.level = 1.0
                return loss + layer.penalty * 1e-3
        return loss


# Classes of the layers, and the module that the reason for one microbatch names.
CASES: dict[str, tuple[Sequence[type[Layer]], str | None]] = {
    "terms": ((Accumulating, Keeping, Bayesian), None),
    "late": ((Late, Clamped, Centred), None),
    "mixed": ((Bayesian, MinibatchDeviation, Centred), "middle (MinibatchDeviation)"),
    "returned": ((Clamped, Layer, Accumulating), "the network returns a tensor of shape ()"),
    "updated": ((UpdatedFirst, Keeping, Late), "stem (UpdatedFirst)"),
    "annealed": ((Layer, Annealed, Centred), None),
}
# Numbers of replicas of the stages. The cuts are after the layers "stem" and "middle".


def create(case: str) -> Module:
    torch.manual_seed(0)
    module = Module(CASES[case][0]).double()
    module.net.norm.eval()  # Otherwise the statistics of the microbatches would differ from those of the batch.
    return module


def train(module: Module, network: Any) -> list[float]:
    """Train some steps, and return the losses."""
    calls: list[int] = []
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    losses = []
    for module.step in range(STEPS):
        images = torch.randn(SAMPLES, 3, 4, 4, dtype=F64, generator=generator)
        targets = torch.randint(3, (SAMPLES,), generator=generator)
        if module.step == 1:
            module.layers[0].conv.register_forward_hook(lambda *_: calls.append(0))
        loss = module.loss(network(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(calls) == STEPS - 1, "a hook that is registered after the first call counts once in a step"
    return losses


class Unseen(Layer):
    """A layer that begins to change a buffer, by an operation whose name does not show it."""

    begins = False

    def __init__(self, inputs: int) -> None:
        super().__init__(inputs)
        self.register_buffer("kept", torch.zeros(2, 4, 4, 4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.begins:
            torch.mul(x.detach(), 2, out=self.kept)
        return x


def check_unseen(places: Places, transport: Transport) -> None:
    """Check that a value is noticed that a forward stores although it never has, and its code does not show it."""
    network = nn.Sequential(Layer(3), Unseen(4)).double()
    divided = PlacedNetwork(network, ["0"], places, transport, AHEAD)
    with places:
        for network[1].begins in (False, False, True):
            images = torch.ones(6, 3, 4, 4, dtype=F64)
            if network[1].begins and transport.place.stage:
                with pytest.raises(RefusedError, match=r"1\.kept, which the code .* does not show"):
                    divided(images)
            else:
                output = divided(images)
            if not network[1].begins:
                output.mean().backward()
    assert divided.runner.terms is not None
    assert divided.runner.terms.without_terms


def train_stage(replicas: tuple[int, ...], ways: Sequence[tuple[str, Any]]) -> list[Any]:
    """Train cases on a rank of a pipeline. Each way is a case, and which forwards run again for the backward."""
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    transport = Transport(Placement(replicas, microbatches=3), timedelta(minutes=1))
    results = []
    for case, checkpointing in ways:
        module = create(case)
        cuts = ["stem", "middle"][: len(replicas) - 1]
        network = PlacedNetwork(module.net, cuts, places, transport, AHEAD, module)
        network.runner.activation_checkpointing = checkpointing
        with places:
            losses = train(module, network)
            state = {name: places.everywhere(tensor.detach()) for name, tensor in module.net.state_dict().items()}
        results.append((losses, state, network.one_microbatch))
    if replicas == (1, 1):
        check_unseen(places, transport)
    places.messages.close()
    return results


def check_layout(replicas: tuple[int, ...], cases_again: Sequence[str], cases: Sequence[str] = tuple(CASES)) -> None:
    modules = {case: create(case) for case in dict.fromkeys([*cases, *cases_again])}
    expected = {case: (train(module, module.net), module.net.state_dict()) for case, module in modules.items()}
    ways = [*((case, "never") for case in cases), *((case, "always") for case in cases_again)]
    for results in run_ranks(sum(replicas), train_stage, replicas, ways):
        for (case, checkpointing), (stage_losses, stage_state, reason) in zip(ways, results, strict=True):
            losses, state = expected[case]
            culprit = CASES[case][1]
            assert (reason is None) if culprit is None else reason.startswith(culprit), reason
            assert stage_losses == pytest.approx(losses, rel=1e-12, abs=0), (case, checkpointing)
            for name, tensor in state.items():
                message = f"{case} {name} {checkpointing}"
                torch.testing.assert_close(stage_state[name], tensor, rtol=1e-12, atol=1e-12, msg=message)


def test_stored_values_are_those_of_the_whole_batch() -> None:
    check_layout((1, 1), ["annealed"])


@pytest.mark.cluster
@pytest.mark.parametrize(("replicas", "cases"), [((2, 2), list(CASES)), ((1, 1, 1), list(CASES))], ids=["2-2", "1-1-1"])
def test_stored_values_are_those_of_the_whole_batch_if_forwards_run_again_and_with_replicas(
    replicas: tuple[int, ...], cases: Sequence[str]
) -> None:
    check_layout(replicas, list(CASES), cases)


@pytest.mark.light
def test_equal_microbatches_are_joined_as_samples_and_a_table_of_positions_is_not() -> None:
    rows, table = torch.ones(2, 3), torch.arange(4.0)
    assert join([(rows,), (rows,)], [2, 2])[0].shape == (4, 3)
    joined_rows, joined_table = join([(rows, table), (rows + 1, table)], [2, 2])
    assert joined_rows.shape == (4, 3)
    assert torch.equal(joined_table, table)
