"""Metrics and predictions of a module whose steps run on every rank with the whole batch."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torchmetrics import (
    AUROC,
    Accuracy,
    CatMetric,
    ConfusionMatrix,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
)

from cnnstrategies.strategies.hybrid_pipeline import metric_values
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share_metrics
from cnnstrategies.strategies.hybrid_pipeline.strategy import predictions_on_rank_zero
from tests.placed.turns import on_ranks
from tests.strategies.test_placed_loading import check_equal

pytestmark = pytest.mark.light
CLASSES = {"task": "multiclass", "num_classes": 3}
METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: Accuracy(**CLASSES),
    "confusion": lambda: ConfusionMatrix(**CLASSES),
    "auroc": lambda: AUROC(**CLASSES),
    "collection": lambda: MetricCollection([Accuracy(**CLASSES, average="macro"), ConfusionMatrix(**CLASSES)]),
    "sum of metrics": lambda: Accuracy(**CLASSES) + 1,
}


def batches(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def use(metric: Any, place: Callable[[Tensor], Tensor]) -> list[Any]:
    """Return the values of a metric that is used as in a training and in a validation epoch."""
    values = []
    for step in range(3):
        outputs, targets = batches(step)
        values.append(metric(place(outputs).requires_grad_().softmax(1), targets))
    values.append(metric.compute())
    metric.reset()
    for step in range(3):
        outputs, targets = batches(step)
        metric.update(place(outputs), targets)
    values.append(metric.compute())
    return values


@pytest.mark.parametrize("small", [0, 1 << 20])
@pytest.mark.parametrize("name", METRICS)
def test_metrics_compute_on_all_ranks_the_values_of_one_device(name: str, small: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(metric_values, "SMALL", small)
    expected = use(METRICS[name](), lambda outputs: outputs)

    def program(places):
        metric = METRICS[name]()
        share_metrics(places, [nn.ModuleList([metric])])
        values = use(metric, lambda outputs: places.give(outputs, (1,)))
        leaves = [leaf for value in values for leaf in (value.values() if isinstance(value, dict) else [value])]
        assert all(places.place_of(leaf) is None for leaf in leaves)
        return [torch.as_tensor(leaf) for leaf in leaves], places.messages.counts.total()

    results = on_ranks(3, program)
    wanted = [leaf for value in expected for leaf in (value.values() if isinstance(value, dict) else [value])]
    for leaves, _ in results:
        for leaf, right in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(leaf, right, rtol=1e-12, atol=1e-12)
    if small and name != "collection":
        assert [messages for _, messages in results] == [0, 2 * 6, 0], "an update needs one message for each other rank"


def test_a_metric_that_is_the_loss_keeps_its_gradient() -> None:
    def program(places):
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        weight = places.give(weight.detach(), (1,)).requires_grad_()
        error, mean = MeanSquaredError(), MeanMetric()
        share_metrics(places, [[error, mean]])
        loss = error(weight * 2, torch.zeros(3, dtype=torch.float64))
        mean(loss)
        loss.backward()
        return [*places.everywhere(weight.grad).tolist(), mean.compute().item(), error.compute().item()]

    assert on_ranks(2, program) == [pytest.approx([8 / 3] * 3 + [4, 4])] * 2


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy(**CLASSES)
        self.parts = nn.ModuleDict({"deep": nn.Sequential()})
        self.parts["deep"].metric = CatMetric()
        self.unregistered = {"train": [MeanMetric()], "both": (MetricCollection([ConfusionMatrix(**CLASSES)]),)}


class Keeper(Callback):
    def __init__(self) -> None:
        self.metric = MeanMetric()


def test_metrics_are_found_in_any_attribute_and_are_restored() -> None:
    """Copies have states of their own."""
    module, keeper = Module(), Keeper()
    metrics: list[Metric] = [
        module.accuracy,
        module.parts["deep"].metric,
        module.unregistered["train"][0],
        *module.unregistered["both"][0].values(),
        keeper.metric,
    ]

    def program(places):
        before = [dict(vars(metric)) for metric in metrics]
        undo = share_metrics(places, [module, keeper])
        assert all(vars(metric)["update"] is not old["update"] for metric, old in zip(metrics, before, strict=True))
        copied = deepcopy(module.unregistered["both"][0])
        outputs, targets = batches(0)
        assert copied(places.give(outputs, (0,)), targets)["MulticlassConfusionMatrix"].sum() == 8
        assert module.unregistered["both"][0]["MulticlassConfusionMatrix"].confmat.sum() == 0
        undo()
        for metric, attributes in zip(metrics, before, strict=True):
            assert all(vars(metric)[name] is attributes[name] for name in ("update", "compute"))

    on_ranks(1, program)


@dataclass
class Boxes:
    scores: Tensor
    names: list[str]


def test_predictions_exist_once_and_can_be_read_by_rank_0_alone() -> None:
    def make(place: Callable[[Tensor], Tensor]) -> Any:
        rows, known = (torch.arange(8.0).reshape(4, 2) for _ in range(2))
        names = ["a", "b", "c", "d"]
        return {
            "rows": place(rows),
            "boxes": Boxes(place(rows)[:, 0], names),
            "pair": (known, place(rows).sum()),
        }

    def program(places):
        result = predictions_on_rank_zero(places, make(lambda rows: places.give(rows, (1, 2))))
        if places.rank == 0:
            check_equal(vars(result.pop("boxes")), vars(make(lambda rows: rows)["boxes"]))
            check_equal(result, {name: value for name, value in make(lambda rows: rows).items() if name != "boxes"})
            assert result["rows"].sum().item() == 28
        else:
            assert result["boxes"].names == []
            shapes = [tuple(t.shape) for t in (result["rows"], result["boxes"].scores, *result["pair"])]
            assert shapes == [(0, 2), (0,), (0, 2), (0,)]
        return predictions_on_rank_zero(places, [places.give(torch.ones(2), (2,)), iter([1])])[0].tolist()

    assert on_ranks(3, program) == [[1.0, 1.0], [], []]
