"""Tests of dividing a network into stages: wherever it is cut, it computes the values of the whole network."""

import copy
import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage import IMAGES, Blueprint, check_backend, divide
from cnnstrategies.pipeline.timetable import Placement, check_layout
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace
from tests.runner.ranks import run_apart

STAGES = 4


class UNet(nn.Module):
    """A U-Net with skip connections over the stages in between; the images are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.head = nn.Conv2d(19, 5, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        first = self.relu(self.down1(images))
        second = self.relu(self.down2(first))
        x = self.relu(self.bottom(second))
        x = torch.cat([self.up2(x), second], dim=1)
        x = torch.cat([self.up1(x), first, images], dim=1)
        return self.head(x).flatten(2)


def build(library: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if library == "own":
        return UNet()
    if library == "torchvision":
        options = {"init_weights": False} if name == "googlenet" else {}
        return torchvision.models.get_model(name, num_classes=5, **options)
    import timm

    return timm.create_model(name, num_classes=5)


def in_stages(blueprint: Blueprint, images: Tensor) -> Any:
    """Run the stages of a network one after the other, and return the network's result."""
    values: dict[str, Any] = {IMAGES: images}
    result: Any = None
    for index, stage in enumerate(blueprint.stages[blueprint.network.training]):
        result = blueprint.build(index)(*(values[name] for name in stage.inputs))
        values |= zip(stage.outputs, result, strict=True) if stage.outputs else {}
    return result


def compare(blueprint: Blueprint, images: Tensor) -> None:
    """Compare the stages' results, gradients and buffers with those of the network, in training and evaluation."""
    network = blueprint.network
    state = copy.deepcopy(network.state_dict())
    for mode in (True, False):
        network.train(mode)
        runs: list[dict[str, Any]] = []
        for run in (lambda: network(images), lambda: in_stages(blueprint, images)):
            network.load_state_dict(state)
            network.zero_grad()
            torch.manual_seed(0)
            outputs = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
            torch.stack([output.square().sum() for output in outputs]).sum().backward()
            gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
            runs.append({"outputs": outputs, "gradients": gradients, "buffers": copy.deepcopy(network.state_dict())})
        expected, actual = runs
        largest = max(float(value.abs().max()) for value in expected["gradients"].values() if value is not None)
        tolerance = 1e-12 if images.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * largest)


def divide_and_compare(library: str, name: str) -> None:
    network = build(library, name)
    positions = cut_positions(trace(network))
    random.seed(name)
    blueprint = divide(network, sorted(random.sample(positions, STAGES - 1)))
    states = [blueprint.build(stage).state_dict() for stage in range(STAGES)]
    assert sorted(name for state in states for name in state) == sorted(network.state_dict())
    size = 75 if "inception" in name else 64
    compare(blueprint, torch.randn(2, 3, size, size))


@pytest.mark.parametrize(("library", "name"), [("timm", "nf_regnet_b0"), ("own", "UNet")])
def test_outputs_and_gradients_equal_the_whole_network(library: str, name: str) -> None:
    """A published network and a U-Net, each cut at three random places into four stages.

    ``make test-zoo`` compares more networks; see `zoo/stages.py`.
    """
    run_apart(divide_and_compare, library, name)


class Changing(nn.Module):
    """Two layers, and between them behaviour that a trace would fix."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.gain = 1.0
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "inference":
                with torch.inference_mode():
                    x = self.block(x)
            case "random" if random.random() < 2:
                x = self.block(x)
            case "numpy" if np.random.rand() < 2:
                x = self.block(x)
            case "torch" if torch.rand(()) < 2:
                x = self.block(x)
            case "attribute":
                self.calls += 1
                x = self.block(x)
            case "branch by value":
                x = self.block(x) if x.sum() > 0 else x
            case "loop by value":
                x = self.block(x) * int(x.max())
            case _:
                x = self.block(x) * self.gain
        return self.head(x)


FIXED = {
    "inference": "block computes under torch.no_grad or torch.enable_grad, .* use .detach()",
    "random": "Changing: its forward draws random numbers with random to choose",
    "numpy": "Changing: its forward draws random numbers with numpy.random",
    "torch": "Changing: its forward draws random numbers with torch",
    "attribute": "Changing: its forward changes the attribute 'calls'",
    "branch by value": r"Sequential\.1 \(Changing, test_stage.py:\d+: 'x = self.block\(x\) if x.sum\(\) > 0",
    "loop by value": r"cannot trace Sequential\.1 \(Changing, test_stage.py:\d+: 'x = self.block\(x\) \* int\(",
}


@pytest.mark.parametrize("how", FIXED)
def test_behaviour_that_a_trace_would_fix_is_refused(how: str) -> None:
    changing = Changing(how)
    with pytest.raises(ConfigurationError, match=FIXED[how]):
        trace(nn.Sequential(nn.Flatten(), changing) if "value" in how else changing)


@pytest.mark.light
def test_a_context_around_the_trace_is_not_a_context_of_the_network() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trace(Changing())


@pytest.mark.light
def test_an_attribute_of_traced_code_cannot_be_changed_after_the_cut() -> None:
    stage = divide(Changing(), [2]).build(0)
    with pytest.raises(ConfigurationError, match=r"gain = 5.0 would have no effect: the network is cut"):
        stage.gain = 5.0
    with pytest.raises(ConfigurationError, match=r"rate = 0.1 would have no effect"):
        stage.block.rate = 0.1
    stage.train()
    stage.requires_grad_(False)
    stage.get_submodule("block.0").anything = 1.0  # A layer is not traced and reads its own attributes.


class Halves(nn.Module):
    """A module that branches on a shape and computes one value without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.conv(x)
        return self.conv(x[..., : int(x.shape[-1]) // 2]).sum(-1) + mean.sum(-1) if x.shape[-1] > 3 else x


class Counting(nn.Conv2d):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images)


class ByShape(nn.Module):
    """A network that branches on shapes.

    segmentation_models_pytorch and MONAI check the sizes of images like this, and timm an embedding's size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        if height % 2 != 0 or width % 2 != 0:
            raise ValueError("odd")
        if not all(size % 2 == 0 for size in images.shape[2:]):
            raise ValueError("odd")
        x = self.first(images)
        for _ in range(int(x.shape[-1]) // 4):
            x = x * 2 if self.training else x
        return self.second(x)


class ByBatch(ByShape):
    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, images: Tensor) -> Tensor:
        return images if images.shape[0] > self.limit else -images


def test_branches_on_shapes_hold_for_images_of_the_traced_shape() -> None:
    def compared() -> None:
        whole = nn.Sequential(nn.Conv2d(3, 4, 1), Halves(), nn.Flatten(), nn.Linear(32, 2)).double()
        images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
        assert "call_module" in {node.op for node in trace(whole).graph.nodes if node.target == "1"}
        compare(divide(whole, ["1"]), images)
        network = ByShape().double()
        with pytest.raises(ConfigurationError, match=r"cannot trace ByShape \(ByShape, test_stage.py:\d+: 'if hei"):
            trace(network)
        assert not decide_by_shapes(network, lambda size: None)
        assert decide_by_shapes(network, lambda size: images[:size])
        with pytest.raises(RuntimeError, match="expected input"):
            decide_by_shapes(network, lambda size: torch.zeros(size, 5, 8, 8).double())
        assert network.first.calls == 0, "trials store nothing, also if they fail"
        assert decide_by_shapes(network, lambda size: images[:size])
        blueprint = divide(network, ["first"])
        compare(blueprint, images[:2])
        other = r"images of shape \(3, 12, 8\): ByShape.forward .* was cut into stages for \(3, 8, 8\)"
        with pytest.raises(ConfigurationError, match=other):
            blueprint.build(0)(torch.randn(2, 3, 12, 8, dtype=torch.float64))
        for limit in (2, 100):
            with pytest.raises(ConfigurationError, match=r"ByBatch\.forward branches on the number of images"):
                decide_by_shapes(ByBatch(limit), lambda size: torch.zeros(size, 3, 8, 8))

    run_apart(compared)


def test_functions_of_einops_become_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    einops: Any = ModuleType("einops")
    monkeypatch.setitem(sys.modules, "einops", einops)

    def rearrange(tensor: Any, pattern: str) -> Tensor:
        if type(tensor) is not Tensor:
            raise RuntimeError(f"Tensor type unknown to einops {type(tensor)}")
        return tensor.transpose(1, 2)

    class Rearranged(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return einops.rearrange(images.relu(), "b c n -> b n c")

    einops.rearrange = rearrange
    images = torch.randn(2, 3, 4)
    assert torch.equal(trace(Rearranged())(images), Rearranged()(images))


class MayJoin(nn.Module):
    """A network that joins features if they are tensors, as a layer of MONAI's BasicUNet does."""

    def forward(self, images: Tensor) -> Tensor:
        features = images.relu()
        joins = features is not None and torch.jit.isinstance(features, Tensor)
        return torch.cat([images, features], 1) if joins else images


def test_values_are_tensors_for_torchscript() -> None:
    images, original = torch.randn(2, 3, 4), torch.jit.isinstance
    assert torch.equal(trace(MayJoin())(images), MayJoin()(images))
    assert torch.jit.isinstance is original


class Shared(nn.Module):
    """A network that uses parameters twice and uses a value under its first name after an in-place change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(self.second(self.first(images)).sin())
        torch.relu_(x)
        return self.third(x) + x


def test_operations_that_must_share_a_stage_are_not_cut_apart() -> None:
    """After a cut before the in-place change, one stage would change its copy, and the next get the old value."""
    assert cut_positions(trace(Shared())) == [5, 6]


REFUSED = [
    (check_layout, (2, Placement((1, 1)), 2), r"2 cuts make 3"),
    (check_layout, (1, Placement((2, 0)), 2), r"every stage needs at least 1 replica"),
    (divide, (Changing(), ["block.1", "block.0"]), "in the order in which the network runs"),
    (divide, (Changing(), ["head"]), "cannot be cut"),
    (check_backend, ("cudagraphs",), r"compile_backend='cudagraphs': .* use inductor, or strategy ddp"),
]


@pytest.mark.light
def test_layouts_cuts_and_backends_that_cannot_run_are_refused() -> None:
    for check, arguments, message in REFUSED:
        with pytest.raises(ConfigurationError, match=message):
            check(*arguments)  # type: ignore[operator]
    check_backend("inductor")
