"""Published modules under every strategy, with their own steps, losses, teachers and optimizers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_uncertainty import losses, routines
from torch_uncertainty.layers.distributions import NormalInverseGammaLinear, NormalLinear
from torch_uncertainty.methods import EMA, mc_dropout
from torch_uncertainty.models import classification
from torch_uncertainty.models.segmentation import packed_small_unet, seg_former, small_unet
from torch_uncertainty.transforms import MIMOBatchFormat, RepeatTarget
from torchgeo import trainers
from torchgeo.datamodules.utils import collate_fn_detection

from tests.zoo.trial import CLASSES, Entry, part_of, try_all

SIZE, SAMPLES = 32, 24
SMALL = "test_resnet"  # timm's smallest ResNet
SEED = torch.Generator().manual_seed(0)
IMAGES = torch.randn(SAMPLES, 3, SIZE, SIZE, generator=SEED)
LABELS = torch.randint(CLASSES, (SAMPLES,), generator=SEED)
MASKS = torch.randint(CLASSES, (SAMPLES, SIZE, SIZE), generator=SEED)
SIDES = torch.randint(SIZE // 4, SIZE // 2, (SAMPLES, 2, 2), generator=SEED)


class Scenes(Dataset[dict[str, Tensor]]):
    """A dataset of dictionaries, like torchgeo's datasets."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields = {"image": IMAGES} | fields

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


class Boxes(Dataset[dict[str, Tensor]]):
    """A dataset for detection with one or two objects in each image."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sides = SIDES[index, : 1 + index % 2]
        corners = torch.arange(len(sides))[:, None].expand(-1, 2) * (SIZE // 2)
        labels = 1 + torch.arange(len(sides))
        return {"image": IMAGES[index], "bbox_xyxy": torch.cat([corners, corners + sides], 1), "label": labels}


def byol() -> trainers.BYOLTask:
    """Return BYOL's task without its random augmentation, which no argument of the task can switch off."""
    task = trainers.BYOLTask(model=SMALL)
    task.model.augment = nn.Identity()
    return task


segmentation = partial(
    trainers.SemanticSegmentationTask, model="unet", backbone="resnet18", in_channels=3, num_classes=CLASSES
)
change = partial(
    trainers.ChangeDetectionTask,
    backbone="timm-mobilenetv3_small_minimal_100",
    task="multiclass",
    num_classes=CLASSES,
    loss="ce",
)
moco = partial(
    trainers.MoCoTask, SMALL, hidden_dim=64, output_dim=32, lr=1e-3,
    augmentation1=nn.Identity(), augmentation2=nn.Identity(),
)  # fmt: skip
LABEL, MASK, REAL_MASK = {"label": LABELS}, {"mask": MASKS}, {"mask": MASKS.float()}
MULTILABEL = {"label": torch.randint(2, (SAMPLES, CLASSES), generator=SEED)}
REAL = {"label": LABELS.float()}
PAIRS = {"image": torch.randn(SAMPLES, 2, 3, SIZE, SIZE, generator=SEED), "mask": MASKS[:, None]}
VIEWS = {"image": torch.randn(SAMPLES, 6, SIZE, SIZE, generator=SEED)}
WEIGHTS = [1.0, 2.0, 3.0, 4.0, 5.0]

# By name: a function that makes the module, the data besides the images, and whether the loss is a mean over images.
TORCHGEO: dict[str, tuple[Callable[[], LightningModule], dict[str, Tensor] | None, bool]] = {
    "ClassificationTask": (partial(trainers.ClassificationTask, "resnet18", num_classes=CLASSES), LABEL, True),
    "ClassificationTask, multi-label": (
        partial(trainers.ClassificationTask, SMALL, task="multilabel", num_labels=CLASSES, loss="bce"),
        MULTILABEL, True,
    ),
    "ClassificationTask, linear probe": (
        partial(trainers.ClassificationTask, SMALL, num_classes=CLASSES, freeze_backbone=True), LABEL, True,
    ),
    "ClassificationTask, class weights": (
        partial(trainers.ClassificationTask, SMALL, num_classes=CLASSES, class_weights=WEIGHTS), LABEL, False,
    ),
    "ClassificationTask, focal": (
        partial(trainers.ClassificationTask, SMALL, num_classes=CLASSES, loss="focal"), LABEL, False,
    ),
    "RegressionTask": (partial(trainers.RegressionTask, "resnet18", num_outputs=1), REAL, True),
    "RegressionTask, mae": (partial(trainers.RegressionTask, SMALL, num_outputs=1, loss="mae"), REAL, True),
    "SemanticSegmentationTask, unet": (segmentation, MASK, True),
    "SemanticSegmentationTask, fcn": (partial(segmentation, model="fcn"), MASK, True),
    "SemanticSegmentationTask, deeplabv3+": (partial(segmentation, model="deeplabv3+"), MASK, True),
    "SemanticSegmentationTask, frozen encoder": (partial(segmentation, freeze_backbone=True), MASK, True),
    "SemanticSegmentationTask, ignore_index": (partial(segmentation, model="fcn", ignore_index=0), MASK, False),
    "SemanticSegmentationTask, jaccard": (partial(segmentation, loss="jaccard"), MASK, False),
    "PixelwiseRegressionTask": (
        partial(trainers.PixelwiseRegressionTask, model="unet", backbone="resnet18", in_channels=3), REAL_MASK, True,
    ),
    "PixelwiseRegressionTask, fcn": (
        partial(trainers.PixelwiseRegressionTask, model="fcn", loss="mae"), REAL_MASK, True,
    ),
    "ChangeDetectionTask, unet": (partial(change, model="unet"), PAIRS, True),
    "ChangeDetectionTask, fcsiamdiff": (partial(change, model="fcsiamdiff"), PAIRS, True),
    "ChangeDetectionTask, fcsiamconc": (partial(change, model="fcsiamconc"), PAIRS, True),
    "BYOLTask": (byol, VIEWS, True),
    "MoCoTask, version 1": (partial(moco, version=1, memory_bank_size=64, output_dim=96), VIEWS, False),
    "MoCoTask, version 2": (partial(moco, version=2, layers=2, memory_bank_size=64), VIEWS, False),
    "MoCoTask, version 3": (partial(moco, version=3), VIEWS, False),
    "SimCLRTask": (
        partial(trainers.SimCLRTask, SMALL, output_dim=32, lr=1e-3, memory_bank_size=0, augmentations=nn.Identity()),
        VIEWS, False,
    ),
    # Faster R-CNN and Mask R-CNN are left out: they are large, and sample candidates at random.
    "ObjectDetectionTask, fcos": (
        partial(trainers.ObjectDetectionTask, "fcos", backbone="resnet18", num_classes=CLASSES), None, False,
    ),
    "ObjectDetectionTask, retinanet": (
        partial(trainers.ObjectDetectionTask, "retinanet", backbone="resnet18", num_classes=CLASSES), None, True,
    ),
}  # fmt: skip


def torchgeo_entry(name: str) -> Entry:
    make, fields, is_mean = TORCHGEO[name]
    # A detector's own code takes lists of images and boxes, which torch.fx cannot trace.
    submodule = "model.backbone" if name.startswith("ObjectDetection") else None

    def data() -> DataLoader[Any]:
        if fields is None:
            return DataLoader(Boxes(), 4, collate_fn=collate_fn_detection)
        return DataLoader(Scenes(fields), 4)

    return Entry(make, data, is_mean, submodule)


@pytest.mark.parametrize("name", part_of(TORCHGEO))
def test_torchgeo(name: str) -> None:
    try_all(f"torchgeo.{name}", torchgeo_entry(name))


def routine(
    kind: Callable[..., LightningModule], make: Callable[[], nn.Module], loss: nn.Module, **arguments: Any
) -> LightningModule:
    network = make()
    return kind(model=network, loss=loss, optim_recipe=torch.optim.SGD(network.parameters(), 1e-3, 0.9), **arguments)


classifier = partial(routine, partial(routines.ClassificationRoutine, num_classes=CLASSES))
segmenter = partial(routine, partial(routines.SegmentationRoutine, num_classes=CLASSES))
regressor = partial(routine, partial(routines.RegressionRoutine, output_dim=1))
net = partial(classification.lenet, 3, CLASSES)


def ensemble(make: Callable[[], nn.Module], repeats: nn.Module | None = None) -> LightningModule:
    return classifier(make, nn.CrossEntropyLoss(), is_ensemble=True, format_batch_fn=repeats or RepeatTarget(4))


def with_head(head: Callable[..., nn.Module]) -> nn.Module:
    """Return a network whose outputs are the parameters of a distribution."""
    return nn.Sequential(classification.lenet(3, 16), nn.ReLU(), head(nn.Linear, event_dim=1, in_features=16))


# By name: a function that makes the module, and its targets. All these losses are means over images.
UNCERTAINTY: dict[str, tuple[Callable[[], LightningModule], Tensor]] = {
    "ClassificationRoutine, cross-entropy": (
        partial(classifier, partial(torchvision.models.resnet18, num_classes=CLASSES), nn.CrossEntropyLoss()), LABELS,
    ),
    "ClassificationRoutine, DECLoss": (
        partial(classifier, partial(torchvision.models.resnet18, num_classes=CLASSES), losses.DECLoss()), LABELS,
    ),
    "ClassificationRoutine, FocalLoss": (partial(classifier, net, losses.FocalLoss(2.0)), LABELS),
    "ClassificationRoutine, ConfidencePenaltyLoss": (partial(classifier, net, losses.ConfidencePenaltyLoss()), LABELS),
    "ClassificationRoutine, packed": (
        partial(ensemble, partial(classification.packed_lenet, 3, CLASSES)), LABELS,
    ),
    "ClassificationRoutine, batch ensemble": (
        partial(ensemble, partial(classification.batchensemble_lenet, 3, CLASSES, repeat_training_inputs=True)), LABELS,
    ),
    "ClassificationRoutine, masked": (
        partial(ensemble, partial(classification.masked_resnet, 3, CLASSES, 18, 4, 2.0, repeat_strategy="legacy")),
        LABELS,
    ),
    "ClassificationRoutine, MIMO": (
        partial(ensemble, partial(classification.mimo_resnet, 3, CLASSES, 18, 2), MIMOBatchFormat(2, rho=1.0)), LABELS,
    ),
    "ClassificationRoutine, MC dropout": (
        partial(classifier, lambda: mc_dropout(net(dropout_rate=0.2), 4), nn.CrossEntropyLoss(), is_ensemble=True),
        LABELS,
    ),
    "ClassificationRoutine, EMA": (partial(classifier, lambda: EMA(net(), 0.9), nn.CrossEntropyLoss()), LABELS),
    "RegressionRoutine": (partial(regressor, partial(classification.lenet, 3, 1), nn.MSELoss()), LABELS.float()),
    "RegressionRoutine, normal distribution": (
        partial(regressor, partial(with_head, NormalLinear), losses.DistributionNLLLoss(), dist_family="normal"),
        LABELS.float(),
    ),
    "RegressionRoutine, evidential": (
        partial(regressor, partial(with_head, NormalInverseGammaLinear), losses.DERLoss(0.01), dist_family="nig"),
        LABELS.float(),
    ),
    "SegmentationRoutine": (partial(segmenter, partial(small_unet, 3, CLASSES), nn.CrossEntropyLoss()), MASKS),
    "SegmentationRoutine, packed": (
        partial(
            segmenter, partial(packed_small_unet, 3, CLASSES, num_estimators=2), nn.CrossEntropyLoss(),
            format_batch_fn=RepeatTarget(2),
        ),
        MASKS,
    ),
    "SegmentationRoutine, SegFormer": (
        partial(segmenter, partial(seg_former, CLASSES, 0), nn.CrossEntropyLoss()), MASKS,
    ),
    "PixelRegressionRoutine": (
        partial(
            routine, partial(routines.PixelRegressionRoutine, output_dim=1), partial(small_unet, 3, 1), nn.MSELoss()
        ),
        MASKS.float(),
    ),
}  # fmt: skip


def uncertainty_entry(name: str) -> Entry:
    make, targets = UNCERTAINTY[name]
    return Entry(make, lambda: DataLoader(TensorDataset(IMAGES, targets), 4))


@pytest.mark.parametrize("name", part_of(UNCERTAINTY))
def test_torch_uncertainty(name: str) -> None:
    try_all(f"torch_uncertainty.{name}", uncertainty_entry(name))
