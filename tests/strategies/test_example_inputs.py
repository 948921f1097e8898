"""Tests of the example inputs with which cuts are chosen: they come from a loader that still gives all its batches."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline import example_inputs
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks


class Module(LightningModule):
    """A module that notes the numbers of the samples it trains with, and a random number of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 1, 1))
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, images = batch
        self.history += [*numbers.tolist(), torch.rand(()).item()]
        return self.net(images).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Changing(Module):
    """A module whose step changes weights, also of a module that no attribute registers, and freezes a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.hidden = nn.Linear(2, 2), [nn.Linear(2, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.slow.requires_grad_(False)
        self.slow.weight.data.add_(1)
        self.slow.bias.data = torch.zeros(2)
        nn.init.zeros_(self.hidden[0].weight[:, :1])
        self.hidden[0].bias.data *= 2
        return super().training_step(batch, batch_idx)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("a stream was read")


def as_object(items: Any) -> Any:
    return SimpleNamespace(images=torch.stack([image for _, image in items]))


IMAGES = torch.arange(10.0).reshape(10, 1, 1, 1)


def test_example_inputs_come_from_a_loader_that_is_not_iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(10), IMAGES)
    generator = torch.Generator().manual_seed(0)
    shuffled = DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))
    module = Module()
    # Batches get the precision's dtype.
    module.trainer = trainer = Trainer(accelerator="cpu", barebones=True, precision="64-true")
    trainer.strategy.connect(module)

    def inputs(loader: Any) -> Any:
        monkeypatch.setattr(example_inputs, "first_loader", lambda trainer: loader)
        return example_inputs.example_inputs(module, "net", 3)

    before, numbers = generator.get_state(), torch.get_rng_state()
    assert torch.equal(inputs(shuffled), IMAGES[:3].double())
    ready = [(torch.zeros(2), IMAGES[4:6])]
    assert torch.equal(inputs(DataLoader(ready, batch_size=None)), IMAGES[4:6].double())  # type: ignore[arg-type]
    # Of a batch that the step does not understand, inputs are not known.
    for unknown in ([shuffled, shuffled], DataLoader(Stream()), DataLoader(data, 4, collate_fn=as_object), None):
        assert inputs(unknown) is None
    assert not module.history, "a copy of the module runs the step"
    trainer.datamodule = SimpleNamespace(image_shape=(1, 5, 5))  # type: ignore[attr-defined]
    assert inputs(shuffled).shape == (3, 1, 5, 5)
    module.example_input_array = IMAGES[:1]
    assert torch.equal(inputs(shuffled), IMAGES[:1].expand(3, 1, 1, 1)), "batch normalisation needs several samples"
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_step_that_runs_for_example_inputs_changes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Changing()
    module.trainer = trainer = Trainer(accelerator="cpu", barebones=True)
    trainer.strategy.connect(module)
    parameters = [*module.parameters(), *module.hidden[0].parameters()]
    before = [(parameter.detach().clone(), parameter.data_ptr()) for parameter in parameters]
    monkeypatch.setattr(
        example_inputs, "first_loader", lambda trainer: DataLoader(TensorDataset(torch.arange(10), IMAGES), 4)
    )
    assert example_inputs.example_inputs(module, "net", 3) is not None
    for parameter, (values, address) in zip(parameters, before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.data_ptr() == address
        assert parameter.requires_grad


def trained(stages: int) -> list[float]:
    """Return what a module has noted in a fit with automatic cuts."""
    if stages > 1:
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(stages)}
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(10), IMAGES)
    loader = DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))
    module = Module()
    strategy = HybridPipelineStrategy(stages=stages) if stages > 1 else "auto"
    quiet_trainer(strategy, stages, max_epochs=2).fit(module, loader)
    return module.history


def test_a_run_with_automatic_cuts_trains_with_all_batches_of_its_loader() -> None:
    expected = run_apart(trained, 1)
    assert len(expected) == 2 * (10 + 3)
    assert run_ranks(2, trained, 2) == [expected, expected]
