"""Published modules under every strategy, with their own steps, losses, teachers and optimizers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import segmentation_models_pytorch as smp
import torch
import torchvision
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, SimSiamPredictionHead, SimSiamProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch_uncertainty.losses import DECLoss
from torch_uncertainty.routines import ClassificationRoutine
from torchgeo.trainers import ClassificationTask, PixelwiseRegressionTask, RegressionTask, SemanticSegmentationTask
from trial import CLASSES, Classifier, images_and_labels, part_of, try_all

SIZE = 64


@pytest.mark.parametrize(
    "name",
    part_of(
        ["Unet", "UnetPlusPlus", "FPN", "PSPNet", "Linknet", "MAnet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet"]
    ),
)
def test_segmentation_models_pytorch(name: str) -> None:
    def make() -> LightningModule:
        torch.manual_seed(0)
        kind = getattr(smp, name)
        return Classifier(kind("resnet18", encoder_weights=None, in_channels=3, classes=CLASSES))

    try_all(
        f"segmentation_models_pytorch.{name}",
        make,
        lambda: images_and_labels(2 * SIZE if name == "PAN" else SIZE, masks=True),
    )


class Scenes(Dataset[dict[str, Tensor]]):
    """As torchgeo's datasets give them."""

    def __init__(self, target: str, real: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(24, 3, SIZE, SIZE, generator=generator)
        shape = (24, SIZE, SIZE) if target == "mask" else (24,)
        self.targets = torch.randint(CLASSES, shape, generator=generator)
        self.target, self.real = target, real

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        target = self.targets[index]
        return {"image": self.images[index], self.target: target.float() if self.real else target}


TORCHGEO: dict[str, tuple[Callable[[], LightningModule], str, bool]] = {
    "ClassificationTask": (
        lambda: ClassificationTask(model="resnet18", in_channels=3, num_classes=CLASSES), "label", False,
    ),
    "RegressionTask": (lambda: RegressionTask(model="resnet18", in_channels=3, num_outputs=1), "label", True),
    "SemanticSegmentationTask, unet": (
        lambda: SemanticSegmentationTask(model="unet", backbone="resnet18", in_channels=3, num_classes=CLASSES),
        "mask", False,
    ),
    "SemanticSegmentationTask, fcn": (
        lambda: SemanticSegmentationTask(model="fcn", in_channels=3, num_classes=CLASSES), "mask", False,
    ),
    "SemanticSegmentationTask, jaccard": (
        lambda: SemanticSegmentationTask(
            model="unet", backbone="resnet18", in_channels=3, num_classes=CLASSES, loss="jaccard"
        ),
        "mask", False,
    ),
    "PixelwiseRegressionTask": (
        lambda: PixelwiseRegressionTask(model="unet", backbone="resnet18", in_channels=3), "mask", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", part_of(TORCHGEO))
def test_torchgeo(name: str) -> None:
    kind, target, real = TORCHGEO[name]

    def make() -> LightningModule:
        torch.manual_seed(0)
        return kind()

    try_all(f"torchgeo.{name}", make, lambda: DataLoader(Scenes(target, real), 4), "jaccard" not in name)


UNCERTAINTY: dict[str, Callable[[], nn.Module]] = {"cross-entropy": nn.CrossEntropyLoss, "DECLoss": DECLoss}


@pytest.mark.parametrize("name", part_of(UNCERTAINTY))
def test_torch_uncertainty(name: str) -> None:
    def make() -> LightningModule:
        torch.manual_seed(0)
        network = torchvision.models.resnet18(num_classes=CLASSES)
        optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
        return ClassificationRoutine(
            model=network, num_classes=CLASSES, loss=UNCERTAINTY[name](), optim_recipe=optimizer
        )

    try_all(f"torch_uncertainty.ClassificationRoutine, {name}", make, lambda: images_and_labels(SIZE))


class Metric(LightningModule):
    """Embeddings, and a loss that has weights of its own."""

    def __init__(self, loss: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.trunk = torchvision.models.resnet18(num_classes=16)
        self.loss = loss(num_classes=CLASSES, embedding_size=16)

    def training_step(self, batch: Any, index: int) -> Tensor:
        value: Tensor = self.loss(self.trunk(batch[0]), batch[1])
        self.log("loss", value)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


@pytest.mark.parametrize(
    "name",
    part_of(["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "SphereFaceLoss", "SubCenterArcFaceLoss"]),
)
def test_pytorch_metric_learning(name: str) -> None:
    def make() -> LightningModule:
        torch.manual_seed(0)
        return Metric(getattr(losses, name))

    try_all(f"pytorch_metric_learning.{name}", make, lambda: images_and_labels(SIZE))


class SimSiam(LightningModule):
    """As in lightly's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torchvision.models.resnet18()
        self.backbone.fc = nn.Identity()
        self.projection_head = SimSiamProjectionHead(512, 64, 32)
        self.prediction_head = SimSiamPredictionHead(32, 16, 32)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return z.detach(), self.prediction_head(z)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (z0, p0), (z1, p1) = self.forward(batch[0]), self.forward(batch[0].flip(-1))
        loss: Tensor = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class BYOL(LightningModule):
    """As in lightly's examples: a teacher that follows the student before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torchvision.models.resnet18()
        self.backbone.fc = nn.Identity()
        self.projection_head = BYOLProjectionHead(512, 64, 32)
        self.prediction_head = BYOLPredictionHead(32, 64, 32)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def training_step(self, batch: Any, index: int) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
        views = (batch[0], batch[0].flip(-1))
        p = [self.prediction_head(self.projection_head(self.backbone(x))) for x in views]
        z = [self.projection_head_momentum(self.backbone_momentum(x)).detach() for x in views]
        loss: Tensor = 0.5 * (self.criterion(p[0], z[1]) + self.criterion(p[1], z[0]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


LIGHTLY: dict[str, type[LightningModule]] = {"SimSiam": SimSiam, "BYOL": BYOL}


@pytest.mark.parametrize("name", part_of(LIGHTLY))
def test_lightly(name: str) -> None:
    def make() -> LightningModule:
        torch.manual_seed(0)
        return LIGHTLY[name]()

    try_all(f"lightly.{name}", make, lambda: images_and_labels(SIZE))
