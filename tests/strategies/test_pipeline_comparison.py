"""Tests of the comparison of stages with the whole network before training, on a microbatch that trains nothing."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from simulated_cuda import simulate
from simulated_gpu import DEVICE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.stage import divide
from cnnstrategies.strategies.hybrid_pipeline import comparison
from cnnstrategies.strategies.hybrid_pipeline.comparison import compare

CPU = torch.device("cpu")
IMAGES = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """A network with one of several behaviours that a trace fixes unnoticed."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.cut_off = False
        self.calls: list[int] = []
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        x = self.drop((x.detach() if self.cut_off else x).mean((2, 3)))
        if self.way == "counts":
            self.calls.append(1)
            x = x * len(self.calls)
        if self.way == "counts in evaluation" and not self.training:
            self.calls.append(1)
            x = x * len(self.calls)
        return self.head(x)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("counts", "Odd: its forward changes the attribute 'calls'"),
        ("counts in evaluation", "Odd: its forward changes the attribute 'calls'"),
        ("loses a gradient", "gives conv.weight another gradient than the whole"),
    ],
)
def test_behaviour_that_a_trace_has_fixed_is_refused_by_name(way: str, message: str) -> None:
    """The network and the random numbers stay as they were."""
    network = Odd(way)
    network.norm.eval()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    numbers = torch.get_rng_state()

    def divide_and_compare() -> None:
        blueprint = divide(network, ["conv"])
        network.cut_off = way == "loses a gradient"
        compare(blueprint, IMAGES, CPU)

    with pytest.raises(ConfigurationError, match=message):
        divide_and_compare()
    network.cut_off = False
    network.way = ""
    compare(divide(network, ["conv"]), IMAGES, CPU)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert network.training
    assert not network.norm.training, "a module that the user keeps in evaluation stays there"
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_network_that_needs_another_device_is_not_refused() -> None:
    blueprint = divide(Odd(), ["conv"])
    blueprint.network.register_forward_pre_hook(lambda *_: torch.ones(1, device="cuda"))
    with pytest.warns(UserWarning, match=r"Odd was not compared with its stages: in training it fails on 2 samples"):
        compare(blueprint, IMAGES, CPU)


class AnotherOrder(TorchDispatchMode):
    """A mode that adds rounding noise to convolutions, whose sums have a different order each time on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            return result
        return tree_map_only(Tensor, self._rounded, result)

    def _rounded(self, value: Tensor) -> Tensor:
        noise = torch.randn(value.shape, generator=self.generator, dtype=value.dtype)
        return value + torch.finfo(value.dtype).eps * value.abs().max() * noise

    generator = torch.Generator().manual_seed(1)


def test_different_rounding_of_sums_is_not_refused() -> None:
    """Batch normalisation removes the bias before it, so the bias's gradient is zero except for rounding."""
    layers = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    network = nn.Sequential(nn.Conv2d(1, 4, 3), *layers, *copy.deepcopy(layers), nn.Flatten(), nn.Linear(64, 3))
    with AnotherOrder():
        compare(divide(network, ["3"]), torch.randn(4, 1, 6, 6), CPU)


class Where(nn.ReLU):
    """A layer that notes dtype and device of each run in training, and fails for some of them."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails, self.notes = fails, Notes()

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor) and self.training:
            assert torch.backends.cudnn.deterministic
            self.notes.append(f"{str(x.dtype).removeprefix('torch.')} {x.device.type}")
            if self.fails in self.notes[-1]:
                raise (torch.OutOfMemoryError if self.fails == "cuda" else RuntimeError)("here not")
        return super().forward(x)


class Notes(list[str]):
    """A list that all copies of a network share."""

    def __deepcopy__(self, memo: Any) -> "Notes":
        return self


@pytest.mark.parametrize(
    ("fails", "tried"),
    [
        ("nowhere", ["float64 cuda"]),
        ("float64", ["float64 cuda", "float32 cuda"]),
        ("cuda", ["float64 cuda", "float32 cuda", "float32 cpu"]),
    ],
)
def test_the_comparison_runs_in_float64_if_it_can(fails: str, tried: list[str]) -> None:
    where = Where(fails)
    network = nn.Sequential(nn.Conv2d(1, 2, 3), where, nn.Flatten(), nn.Linear(32, 2))
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.conv.fp32_precision
    with simulate():
        compare(divide(network, ["0"]), torch.randn(4, 1, 6, 6), DEVICE.name)
    assert where.notes == [*tried, tried[-1]], "the whole network runs first, then the stages"
    assert next(network.parameters()).device == CPU
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.conv.fp32_precision) == before


class Resizing(nn.ReLU):
    """A layer that makes a table for the size of its images, like timm's ConViT."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: Any) -> Any:
        self.table = torch.ones(x.shape[-1])
        return super().forward(x) * self.table


def test_a_buffer_that_changes_shape_is_refused_and_restored() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), Resizing(), nn.Flatten(), nn.Linear(32, 2))
    with pytest.raises(ConfigurationError, match=r"puts a buffer of another shape in the place of 1\.table"):
        compare(divide(network, ["0"]), IMAGES, CPU)
    assert network[1].table.shape == (1,)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("a stream was read")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Odd()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[1]).sum()


def test_the_example_batch_comes_from_a_plain_loader_without_consuming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.arange(10.0).reshape(10, 1, 1, 1)
    data = TensorDataset(torch.zeros(10), images)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))
    trainer = Trainer(
        accelerator="cpu", logger=False, barebones=True, precision="64-true"
    )  # Batches get the precision's dtype.
    trainer.strategy.connect(module := Module())
    before, numbers = generator.get_state(), torch.get_rng_state()
    module.trainer = trainer
    for source, expected in (
        (loader, images[:3]),
        (DataLoader([(torch.zeros(2), images[4:6])], batch_size=None), images[4:6]),  # type: ignore[arg-type]
        ([loader, loader], None),
        (DataLoader(Stream()), None),
        (None, None),
    ):
        monkeypatch.setattr(comparison, "train_loader", lambda trainer, source=source: source)
        example = comparison.example_images(module, "net", 3)
        assert example is None if expected is None else torch.equal(example, expected.double())
    unusual = DataLoader(
        data, 4, collate_fn=lambda items: SimpleNamespace(images=torch.stack([image for _, image in items]))
    )
    monkeypatch.setattr(comparison, "train_loader", lambda trainer: unusual)
    with pytest.raises(ConfigurationError, match=r"a batch is a SimpleNamespace, .* collate_fn return a tuple"):
        comparison.example_images(module, "net", 3)
    trainer.datamodule = SimpleNamespace(image_shape=(1, 5, 5))  # type: ignore[attr-defined]
    example = comparison.example_images(module, "net", 3)
    assert isinstance(example, Tensor)
    assert example.shape == (3, 1, 5, 5)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), numbers)
    module.example_input_array = images[:1]
    repeated = comparison.example_images(module, "net", 3)
    assert torch.equal(repeated, images[:1].expand(3, 1, 1, 1)), "batch normalisation needs several samples"
