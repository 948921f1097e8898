"""`DetectionModule`: losses and mean average precision, equal to one device whatever divides the images, in float64."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.models.detection import FCOS, FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

from cnnstrategies import ConfigurationError, DetectionModule, verify
from cnnstrategies.callbacks import PredictionWriter
from cnnstrategies.data import DigitsDataModule, SyntheticDetectionDataModule, synthetic_shapes
from cnnstrategies.detectors import SmallBackbone, SmallRetinaNet
from cnnstrategies.models import detection_quality
from cnnstrategies.models.detection_quality import DetectionQuality
from cnnstrategies.models.detector import OWN_FOREGROUND, PADDED, SAMPLED
from cnnstrategies.models.joined_batches import joined
from cnnstrategies.models.samples import count_samples
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.samplers import ShuffledBatches
from cnnstrategies.strategies import BalancedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy
from cnnstrategies.strategies.differences import differences_of_replicas
from cnnstrategies.strategies.joined_parts import count_samples as count_of_part
from cnnstrategies.strategies.joined_parts import join_parts
from cnnstrategies.strategies.spatial.checks import check_module
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks

SIZE, CLASSES, SEED = 32, 3, 31
FIXED = {"min_size": SIZE, "max_size": SIZE}


def retinanet() -> nn.Module:
    return SmallRetinaNet(CLASSES, SIZE, widths=(4, 8))


def fcos() -> nn.Module:
    anchors = AnchorGenerator(((4,), (8,)), ((1.0,),) * 2)
    return FCOS(SmallBackbone(3, (4, 32)), CLASSES, anchor_generator=anchors, **FIXED)


def ssd() -> nn.Module:
    anchors = DefaultBoxGenerator([[2], [2]], scales=[0.2, 0.5, 0.9], steps=[2, 4])
    backbone: Any = SmallBackbone(3, (4, 8))
    backbone.out_channels = [8, 8]
    return SSD(backbone, anchors, (SIZE, SIZE), CLASSES)


def faster_rcnn() -> nn.Module:
    anchors = AnchorGenerator(((8,), (16,)), ((1.0,),) * 2)
    return FasterRCNN(SmallBackbone(3, (4, 8)), CLASSES, rpn_anchor_generator=anchors, **FIXED)


def made(network: Any) -> DetectionModule:
    torch.manual_seed(5)
    return DetectionModule(network(), CLASSES, optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9))


def shapes(**options: Any) -> SyntheticDetectionDataModule:
    return SyntheticDetectionDataModule(20, CLASSES, SIZE, **{"global_batch_size": 6, **options})


def batch_of(indices: list[int]) -> Any:
    data = shapes()
    data.setup("fit")
    return data.train_source.fetch(indices)


class NoLosses(nn.Module):
    """A network that returns its images in training."""

    def forward(self, images: list[Tensor], targets: Any) -> list[Tensor]:
        return images


def trained(network: Any, strategy: Any = "auto", world: int = 1, **options: Any) -> dict[str, Tensor]:
    """Train in a process of its own, and return the weights."""

    def run() -> dict[str, Tensor]:
        module = made(network).double()  # The parent of forked ranks converts no weights.
        quiet_trainer(strategy, world, max_epochs=1, precision="64-true", **options).fit(module, shapes(seed=SEED))
        return dict(module.network.state_dict())

    return run_apart(run)


def reference(network: Any) -> dict[str, Tensor]:
    """Train one device by a plain loop with torchvision's own losses, and return the weights."""

    def run() -> dict[str, Tensor]:
        module, data = made(network).double(), shapes(seed=SEED)
        data.setup("fit")
        optimizer = torch.optim.SGD(module.network.parameters(), 0.02, momentum=0.9)
        for images, targets in data.train_dataloader():
            doubled = [{**target, "boxes": target["boxes"].double()} for target in targets]
            optimizer.zero_grad()
            torch.set_default_dtype(torch.float64)  # As Lightning does for a step; torchvision has constants.
            sum(module.network([image.double() for image in images], doubled).values()).backward()
            torch.set_default_dtype(torch.float32)
            optimizer.step()
        return dict(module.network.state_dict())

    return run_apart(run)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def uneven(**options: Any) -> BalancedDDPStrategy:
    return BalancedDDPStrategy(start_method="fork", shares=[2, 1], **options)


def served() -> ParameterServerStrategy:
    return ParameterServerStrategy(start_method="fork")


@pytest.fixture
def half_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the images with odd numbers without boxes.

    Rank 1 has no boxes in the second batch, and no rank in the last. One rank validates an image without boxes.
    """
    monkeypatch.setattr(synthetic_shapes, "EMPTY", 2)
    for shares in ([2, 1], [1, 1]):
        ranks = [ShuffledBatches(20, 6, SEED, 2, rank, False, history=ShareHistory(shares)) for rank in (0, 1)]
        empty = [[all(index % 2 for index in batch.indices) for batch in rank] for rank in ranks]
        assert empty == [[False, False, False, True], [False, True, False, True]]


@pytest.mark.usefixtures("half_empty")
@pytest.mark.parametrize(
    ("network", "strategies"),
    [
        (retinanet, [uneven, served]),
        (fcos, [uneven]),
        (ssd, [uneven]),
    ],
)
def test_the_weights_are_those_of_a_plain_loop_on_one_device(network: Any, strategies: list[Any]) -> None:
    expected = reference(network)
    for strategy in strategies:
        assert_equal(trained(network, strategy(), 2), expected)


@pytest.mark.cluster  # These runs take long.
@pytest.mark.usefixtures("half_empty")
def test_pipelines_and_the_other_strategies_train_the_same_weights() -> None:
    expected = reference(retinanet)
    assert_equal(trained(retinanet), expected)
    assert_equal(trained(retinanet, DDPStrategy(start_method="fork"), 2), expected)
    assert_equal(trained(retinanet, HybridPipelineStrategy(start_method="fork"), 2), expected)
    for network in (fcos, ssd):
        expected = reference(network)
        assert_equal(trained(network, served(), 2), expected)
        assert_equal(trained(network, HybridPipelineStrategy(start_method="fork"), 2), expected)


@pytest.mark.cluster  # These runs take long.
def test_averaged_weights_and_predictions_are_those_of_one_device() -> None:
    averaged = {"callbacks": [EMAWeightAveraging(decay=0.5)]}
    expected = trained(retinanet, **averaged)
    assert_equal(trained(retinanet, uneven(), 2, **averaged), expected)
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(expected, reference(retinanet))

    file = Path("out.json").resolve()

    def predict(strategy: Any, world: int) -> list[dict[str, Any]]:
        def run() -> None:
            module = made(retinanet).double()
            module.network.score_thresh, module.network.detections_per_img = 0.0, 4
            trainer = quiet_trainer(strategy, world, precision="64-true", callbacks=[PredictionWriter(file)])
            trainer.predict(
                module, SyntheticDetectionDataModule(70, CLASSES, SIZE, batch_size=3), return_predictions=False
            )

        run_apart(run)
        rows: list[dict[str, Any]] = json.loads(file.read_text())
        return sorted(rows, key=lambda row: (row["image_id"], -row["score"], row["bbox"]))

    alone = predict("auto", 1)
    assert {row["image_id"] for row in alone} == set(range(7))
    assert predict(DDPStrategy(start_method="fork"), 2) == alone
    assert predict(HybridPipelineStrategy(start_method="fork"), 2) == alone


def boxes_of(*corners: tuple[float, ...], labels: list[int], **more: list[float]) -> dict[str, Tensor]:
    fields = {name: torch.tensor(values) for name, values in more.items()}
    return {"boxes": torch.tensor(corners).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64), **fields}


# Right, shifted and missing boxes, an image without boxes, one with a wrong box only, and one with a crowd.
TARGETS = [
    boxes_of((0.0, 0.0, 9.0, 9.0), (20.0, 20.0, 30.0, 32.0), labels=[1, 2]),
    boxes_of(labels=[]),
    boxes_of((5.0, 5.0, 15.0, 15.0), labels=[1]),
    boxes_of((0.0, 0.0, 30.0, 30.0), (1.0, 2.0, 8.0, 9.0), labels=[1, 1], iscrowd=[1, 0]),
    boxes_of(labels=[]),
]
DETECTIONS = [
    boxes_of((0.0, 1.0, 9.0, 9.0), (20.0, 20.0, 30.0, 30.0), labels=[1, 2], scores=[0.9, 0.6]),
    boxes_of((3.0, 3.0, 9.0, 9.0), labels=[2], scores=[0.7]),
    boxes_of(labels=[], scores=[]),
    boxes_of((2.0, 2.0, 8.0, 9.0), (10.0, 10.0, 20.0, 20.0), labels=[1, 1], scores=[0.8, 0.5]),
    boxes_of(labels=[], scores=[]),
]


def whole_quality() -> dict[str, Tensor]:
    metric = MeanAveragePrecision()
    metric.update(DETECTIONS, TARGETS)
    return {name: value for name, value in metric.compute().items() if name in ("map", "map_50", "map_75")}


def quality_of_rank(parts: list[list[int]]) -> dict[str, Tensor]:
    metric = DetectionQuality()
    for index in parts[dist.get_rank()]:
        metric.update([DETECTIONS[index]], [{**TARGETS[index], "image_id": torch.tensor(index + 7)}])
    metric.update([], [])
    return metric.compute()


def test_the_precision_over_ranks_counts_each_image_once() -> None:
    expected = whole_quality()
    assert 0 < expected["map"] < expected["map_50"] < 1
    # The ranks have different numbers of images, rank 1 repeats one of rank 0, and rank 2 has none.
    for result in run_ranks(3, quality_of_rank, [[3, 0, 4], [0, 1, 2, 1], []]):
        assert result == pytest.approx(expected)


@pytest.mark.light
def test_the_precision_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = DetectionQuality()
    metric.update(DETECTIONS, TARGETS)
    metric.update(DETECTIONS[:1], TARGETS[:1])  # Without identities, both images count.
    again = MeanAveragePrecision()
    again.update([*DETECTIONS, DETECTIONS[0]], [*TARGETS, TARGETS[0]])
    assert metric.compute() == pytest.approx({name: again.compute()[name] for name in ("map", "map_50", "map_75")})
    metric.reset()
    metric.update(DETECTIONS[4:], TARGETS[4:])
    assert metric.compute()["map"] == -1
    monkeypatch.setattr(detection_quality, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"not installed: run pip install 'cnnstrategies\[detection\]'"):
        made(retinanet)


@pytest.mark.light
def test_losses_of_torchvision_are_summed_with_their_weights() -> None:
    batch = batch_of([0, 1, 7])
    assert count_samples(batch) == 3
    for network in (retinanet, fcos, ssd):
        module = made(network)
        expected = module.network(*batch)
        first = next(iter(expected))
        module.loss_weights = {first: 3.0}
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        loss = module.training_step(batch, 0)
        torch.testing.assert_close(loss, sum(expected.values()) + 2 * expected[first])
        if network is retinanet:
            assert module.loss_weight(batch[1]) == 3
            continue
        # The loss of a batch is the mean of its images' losses, weighted by their foreground boxes.
        counts, losses = [], []
        for image, target in zip(*batch, strict=True):
            losses.append(module.training_step(([image], [target]), 0))
            counts.append(int(module.loss_weight([target])))
        assert counts[2] == 0
        total = sum(max(1, count) * value for count, value in zip(counts, losses, strict=True))
        torch.testing.assert_close(loss, total / sum(counts))
        assert "compute_loss" not in vars(module.network) | vars(module.network.head)


@pytest.mark.light
def test_mistakes_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"DigitsDataModule has no boxes, which DetectionModule needs"):
        DetectionModule(retinanet(), 10).check_data(DigitsDataModule())
    zero = SimpleNamespace(num_classes=CLASSES, first_label=0)
    made(fcos).check_data(zero)  # type: ignore[arg-type]
    for network in (ssd, faster_rcnn):
        with pytest.raises(ConfigurationError, match=r"first_label=0, but .* needs label 0 for the background"):
            made(network).check_data(zero)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"num_classes=3, but SyntheticDetectionDataModule has num_classes=4"):
        made(retinanet).check_data(SyntheticDetectionDataModule())
    with pytest.raises(ConfigurationError, match=r"loss_weights: bbox_regression has the weight -1"):
        DetectionModule(retinanet(), CLASSES, loss_weights={"bbox_regression": -1.0})
    module = DetectionModule(NoLosses(), CLASSES)
    with pytest.raises(ConfigurationError, match="NoLosses returned list in training instead of a mapping of losses"):
        module.training_step(([torch.zeros(3, 8, 8)], [{}]), 0)
    module = made(retinanet)
    module.loss_weights = {"box": 2.0}
    with pytest.raises(ConfigurationError, match="loss_weights has 'box', but the losses of SmallRetinaNet are class"):
        module.training_step(batch_of([0]), 0)


def test_the_panel_names_what_differs_from_one_device() -> None:
    assert made(retinanet).differences_of_parts(weighted=False) == [PADDED]
    assert made(fcos).differences_of_parts(weighted=False) == [OWN_FOREGROUND, PADDED]
    assert made(ssd).differences_of_parts(weighted=True) == [PADDED]
    module = made(faster_rcnn)
    lines = differences_of_replicas(module, 2, 4, "those of rank 0", weighted=True)
    assert lines == [SAMPLED, PADDED, "random draws (as in dropout) are each process's own"]
    trainer = quiet_trainer()
    trainer.datamodule = shapes()  # type: ignore[attr-defined]
    module.trainer = trainer
    assert module.differences_of_parts(weighted=True) == [SAMPLED]


@pytest.mark.light
@pytest.mark.parametrize("counts", [(2, 2), (2, 1), (3, 3)])
def test_batches_of_few_images_are_joined_as_images_and_boxes(counts: tuple[int, int]) -> None:
    """A batch of two images is a pair of lists of two items, as is a list of two samples."""
    parts = [batch_of([*range(count)]) for count in counts]
    for result in (joined(parts), join_parts(parts, [count_of_part(part) for part in parts])):
        images, targets = result
        assert len(images) == len(targets) == sum(counts)
        assert all("boxes" in target for target in targets)
        expected = sorted(int(target["image_id"]) for part in parts for target in part[1])
        assert sorted(int(target["image_id"]) for target in targets) == expected


def test_verify_compares_detectors_with_one_device() -> None:
    data = shapes(global_batch_size=4)
    verdict = verify(made(fcos), data, BalancedDDPStrategy(start_method="fork"), devices=2, steps=2)
    assert verdict.equal, str(verdict)


@pytest.mark.light
def test_images_that_strategies_divide_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"spatial cannot train DetectionModule: .* whole images: use strategy"
    ):
        check_module(made(retinanet))
