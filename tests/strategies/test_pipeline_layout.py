"""Tests of the layout that a pipeline chooses from its arguments, the network and the data."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cnnstrategies import ConfigurationError
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link, NodeCost, Profile, Value
from cnnstrategies.planning.rank import rank
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline import layout as layout_module
from cnnstrategies.strategies.hybrid_pipeline import profiling
from cnnstrategies.strategies.hybrid_pipeline.example_inputs import arguments_of_call
from cnnstrategies.strategies.hybrid_pipeline.layout import ChosenLayout
from tests.conftest import PlainCNN


@pytest.mark.parametrize(
    ("network", "data", "asked", "expected"),
    [
        (SmallCNN(10), DigitsDataModule(batch_size=32), None, 4),
        (SmallCNN(10), DigitsDataModule(batch_size=64), None, 8),
        (PlainCNN(), DigitsDataModule(batch_size=32), None, 8),
        (SmallCNN(10), DigitsDataModule(batch_size=32), 16, 16),
        (SmallCNN(10), DataLoader([0] * 99, 32), None, 4),
        (SmallCNN(10), [], None, 8),
        (SmallCNN(10), LightningDataModule(), None, 8),
    ],
    ids=["batch norm", "larger batch", "no batch norm", "asked for", "a loader", "no loader", "another data module"],
)
def test_microbatches_follow_batch_normalisation_and_the_batch(network, data, asked, expected, monkeypatch):
    cut = "block1" if isinstance(network, SmallCNN) else "1"
    request = HybridPipelineStrategy(replicas=[1, 1], cuts=[cut], microbatches=asked).request
    is_module = isinstance(data, LightningDataModule)
    trainer = SimpleNamespace(datamodule=data if is_module else None, state=SimpleNamespace(fn=TrainerFn.FITTING))
    monkeypatch.setattr(layout_module, "train_loader", lambda trainer: None if is_module else data)
    layout = request.choose(network, trainer, 2, torch.device("cpu"), lambda size: None)
    assert layout.microbatches == expected


class MovedTeacher(LightningModule):
    """Before it calls the network, it moves a teacher towards the network, and makes the network's weights smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            for teacher, online in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                teacher.data = 0.9 * teacher.data + 0.1 * online.data
                online.mul_(0.9)
        loss: Tensor = self.net(batch).sum()
        return loss


def test_the_step_that_shows_the_inputs_of_the_network_leaves_all_parameters_as_they_are() -> None:
    module = MovedTeacher()
    module.trainer = SimpleNamespace(loggers=[])
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    images = torch.randn(4, 3)
    arguments = arguments_of_call(module, "net", "training_step", images)
    assert arguments is not None
    assert arguments[0] is images
    for name, parameter in module.named_parameters():
        address, value = before[name]
        assert parameter.data_ptr() == address, name
        assert torch.equal(parameter, value), name


def uneven() -> Profile:
    """Return the profile of a network whose best cut depends on the costs of messages and of parameters."""
    sizes = (400_000, 2_000_000, 300_000, 100, 200_000)
    times = (0.010, 0.012, 0.008, 0.004, 0.012, 0.009)
    parameters = (10_000, 20_000, 10_000, 30_000, 400_000, 800_000)
    nodes = tuple(
        NodeCost(f"n{i}", time, 2 * time, size, 1000)
        for i, (time, size) in enumerate(zip(times, parameters, strict=True))
    )
    values = tuple(Value(i, (i + 1,), size, size) for i, size in enumerate(sizes))
    return Profile(GraphCosts(nodes, values, (1, 2, 3, 4, 5), 8, 700), ((0.001, 0.001),) * 6)


def test_fit_chooses_the_cuts_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice uses the measured link, the trainer's precision and the optimizer's memory; each one matters."""
    seen: list[Any] = []

    def measured(*arguments: Any) -> Profile:
        seen.append(arguments[4])
        return uneven()

    monkeypatch.setattr(profiling, "measure_profile", measured)
    monkeypatch.setattr(layout_module, "broadcast_value", lambda value, *_: value)
    network, cuts = PlainCNN(), {}
    parameters = list(network.parameters())
    for name, bandwidth, limit, optimizer in (
        ("fast", 1e10, None, torch.optim.SGD(parameters, 0.1)),
        ("slow", 1e6, None, torch.optim.SGD(parameters, 0.1)),
        ("sgd", 1e10, 5_000_000, torch.optim.SGD(parameters, 0.1)),
        ("adam", 1e10, 7_500_000, torch.optim.AdamW(parameters)),
        ("room", 1e10, 10_000_000, torch.optim.AdamW(parameters)),
    ):
        cluster = Cluster.flat(2, Link(bandwidth, 5e-5))
        monkeypatch.setattr(layout_module, "measure_cluster", lambda nodes, device, cluster=cluster: cluster)
        trainer: Any = SimpleNamespace(
            datamodule=SimpleNamespace(batch_size=64), num_nodes=1, global_rank=0, precision="bf16-mixed",
            strategy=SimpleNamespace(optimizers=[optimizer]), lightning_module=None, state=SimpleNamespace(fn=None),
        )  # fmt: skip
        request = HybridPipelineStrategy(replicas=[1, 1], microbatches=8, memory_limit=limit).request
        images = torch.randn(32, 1, 8, 8)
        layout = request.choose(network, trainer, 2, torch.device("cpu"), lambda size, images=images: images)
        copies = 4 if isinstance(optimizer, torch.optim.AdamW) else 2
        options: dict[str, Any] = {"microbatches": 8, "replicas": (1, 1)}
        job = Job(uneven(), cluster, 64, state_copies=copies, memory_limit=limit, **options)
        chosen = rank(job).hybrid
        assert chosen is not None
        assert layout.cuts == list(chosen.layout.cuts), name
        assert layout.run_ahead == chosen.predictor.runs_ahead(chosen.layout), name
        cuts[name] = layout.cuts
    assert set(seen) == {"bf16-mixed"}
    assert cuts["fast"] != cuts["slow"], "the link must matter"
    assert cuts["adam"] != cuts["room"], "the limit of memory must matter"


def test_activations_are_computed_again_where_the_memory_limit_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule gpipe keeps the activations of all microbatches, and 1f1b those of few."""
    costs = uneven().costs
    profile = Profile(replace(costs, nodes=tuple(replace(node, saved_bytes=10**6) for node in costs.nodes)))
    monkeypatch.setattr(profiling, "measure_profile", lambda *_: profile)
    monkeypatch.setattr(layout_module, "broadcast_value", lambda value, *_: value)
    monkeypatch.setattr(layout_module, "measure_cluster", lambda *_: Cluster.flat(2, Link(1e10, 5e-5)))
    trainer: Any = SimpleNamespace(
        datamodule=SimpleNamespace(batch_size=64), num_nodes=1, global_rank=0, precision="32-true",
        strategy=SimpleNamespace(optimizers=[]), lightning_module=None, state=SimpleNamespace(fn=None),
    )  # fmt: skip

    def choose(first: Any = None, **options: Any) -> ChosenLayout:
        request = HybridPipelineStrategy(replicas=[1, 1], microbatches=8, **options).request
        example, cpu = lambda size: torch.randn(size, 1, 8, 8), torch.device("cpu")
        return request.choose(PlainCNN(), trainer, 2, cpu, example, first)

    limit = 15 * 10**6
    for layout in (choose(schedule="1f1b", memory_limit=limit), choose(schedule="gpipe")):
        assert layout.checkpointing == "never"
        assert not layout.panel_rows()
    layout = choose(schedule="gpipe", memory_limit=limit)
    assert layout.checkpointing == "except_last"
    ((_, text),) = layout.panel_rows()
    assert "except those of a rank's last microbatch: a device with stored activations would need 30 MiB" in text
    assert text.endswith("and the limit is 14 MiB")
    with pytest.raises(ConfigurationError, match="set activation_checkpointing='always'"):
        choose(schedule="gpipe", memory_limit=limit, activation_checkpointing="never")
    small_first, small_last = (
        choose(schedule="1f1b", memory_limit=limits).cuts[0] for limits in (["7MB", "1GiB"], ["1GiB", "7MB"])
    )
    assert small_first < small_last, "each rank has its own limit"
    with pytest.raises(ConfigurationError, match=r"memory_limit=\[7000000\] has length 1, but there are 2 processes"):
        choose(schedule="1f1b", memory_limit=["7MB"])
    turned = HybridPipelineStrategy(replicas=[2, 2], placement="replicas", memory_limit=[1, 2, 3, 4]).request
    assert turned.memory_limit_on(4) == (1, 3, 2, 4), "the limits of the ranks, stage by stage"
    # The first steps in the order gpipe keep the inputs of all microbatches.
    for first, expected in ((None, "never"), ("gpipe", "except_last")):
        assert choose(first, schedule="1f1b", memory_limit=11 * 10**6).checkpointing == expected
    ((_, text),) = choose(schedule="gpipe", activation_checkpointing="always").panel_rows()
    assert text == "computed again in the backward: as configured"


def test_a_network_that_fails_on_the_batch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may give the network a part of each image, so that the batch's samples have a different shape."""
    monkeypatch.setattr(layout_module, "broadcast_value", lambda value, *_: value)
    cluster = Cluster.flat(2, Link(1e10, 5e-5))
    monkeypatch.setattr(layout_module, "measure_cluster", lambda nodes, device: cluster)
    trainer: Any = SimpleNamespace(
        datamodule=None, num_nodes=1, global_rank=0, precision="32-true",
        strategy=SimpleNamespace(optimizers=[]), lightning_module=None, state=SimpleNamespace(fn=None),
    )  # fmt: skip
    request = HybridPipelineStrategy(replicas=[1, 1]).request
    message = r"SmallCNN fails on what the batch has, samples of shape \(6, 8, 8\): RuntimeError: .*6 channels"
    with pytest.raises(ConfigurationError, match=message):
        request.choose(SmallCNN(10), trainer, 2, torch.device("cpu"), lambda size: torch.randn(size, 6, 8, 8))
