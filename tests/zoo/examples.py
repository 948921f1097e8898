"""Published losses, heads and memory banks under every strategy, in modules like their packages' examples."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from lightly import loss as lightly_loss
from lightly.models.modules import NNMemoryBankModule, heads
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from tests.zoo.trial import CLASSES, Entry, images_and_labels, part_of, try_all

SIZE, FEATURES = 32, 96


class Example(LightningModule):
    """Common part of the examples: the optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Metric(Example):
    """A module that learns embeddings with a loss of metric learning."""

    def __init__(self, loss: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.trunk = timm.create_model("test_resnet", num_classes=16)
        self.loss = loss()

    def training_step(self, batch: Any, index: int) -> Tensor:
        value: Tensor = self.loss(self.trunk(batch[0]), batch[1])
        self.log("loss", value)
        return value


def with_proxies(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a loss with weights of its own."""
    return partial(kind, num_classes=CLASSES, embedding_size=16)


# By name: a function that makes the loss, and whether the loss is a mean over images.
METRIC_LEARNING: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "ArcFaceLoss": (with_proxies(losses.ArcFaceLoss), True),
    "CosFaceLoss": (with_proxies(losses.CosFaceLoss), True),
    "NormalizedSoftmaxLoss": (with_proxies(losses.NormalizedSoftmaxLoss), True),
    "SphereFaceLoss": (with_proxies(losses.SphereFaceLoss), True),
    "SubCenterArcFaceLoss": (with_proxies(losses.SubCenterArcFaceLoss), True),
    "SoftTripleLoss": (with_proxies(losses.SoftTripleLoss), True),
    "ProxyNCALoss": (with_proxies(losses.ProxyNCALoss), True),
    "ProxyAnchorLoss": (with_proxies(losses.ProxyAnchorLoss), False),
    "TripletMarginLoss": (losses.TripletMarginLoss, False),
    "ContrastiveLoss": (losses.ContrastiveLoss, False),
    "MultiSimilarityLoss": (losses.MultiSimilarityLoss, False),
    "CircleLoss": (losses.CircleLoss, False),
    "SupConLoss": (losses.SupConLoss, False),
    "CrossBatchMemory": (lambda: losses.CrossBatchMemory(losses.ContrastiveLoss(), 16, 64), False),
    "ContrastiveLoss, DistributedLossWrapper": (lambda: DistributedLossWrapper(losses.ContrastiveLoss()), False),
}


def metric_entry(name: str) -> Entry:
    loss, is_mean = METRIC_LEARNING[name]
    batch = 4 if is_mean else 12  # A batch of 12 has pairs of images of the same class.
    return Entry(lambda: Metric(loss), lambda: images_and_labels(SIZE, batch=batch), is_mean)


@pytest.mark.parametrize("name", part_of(METRIC_LEARNING))
def test_pytorch_metric_learning(name: str) -> None:
    try_all(f"pytorch_metric_learning.{name}", metric_entry(name))


class Twins(Example):
    """A module with two views of each image and a loss of the views' projections."""

    def __init__(self, head: Callable[..., nn.Module], criterion: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.backbone = timm.create_model("test_resnet", num_classes=0)
        self.projection_head = head(FEATURES, 64, 32)
        self.criterion = criterion()

    def forward(self, x: Tensor) -> Any:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x0, x1 = batch[0], batch[0].flip(-1)
        loss = self.compare(x0, x1)
        self.log("loss", loss)
        return loss

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        """Return the loss of two views."""
        loss: Tensor = self.criterion(self(x0), self(x1))
        return loss


class SimSiam(Twins):
    """A module that predicts the other view's projection."""

    def __init__(self) -> None:
        super().__init__(heads.SimSiamProjectionHead, lightly_loss.NegativeCosineSimilarity)
        self.prediction_head = heads.SimSiamPredictionHead(32, 16, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = super().forward(x)
        return z.detach(), self.prediction_head(z)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        (z0, p0), (z1, p1) = self(x0), self(x1)
        loss: Tensor = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
        return loss


class NNCLR(SimSiam):
    """A module that predicts the projection's nearest neighbour in a memory bank."""

    def __init__(self) -> None:
        Twins.__init__(self, heads.NNCLRProjectionHead, lightly_loss.NTXentLoss)
        self.prediction_head = heads.NNCLRPredictionHead(32, 16, 32)
        self.memory_bank = NNMemoryBankModule(size=(64, 32))

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        (z0, p0), (z1, p1) = self(x0), self(x1)
        z0, z1 = self.memory_bank(z0, update=False), self.memory_bank(z1, update=True)
        loss: Tensor = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
        return loss


class Momentum(Twins):
    """A module in which a teacher computes the other view's projection; it follows the student before each step."""

    def __init__(self, head: Callable[..., nn.Module], criterion: Callable[[], nn.Module]) -> None:
        super().__init__(head, criterion)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = head(FEATURES, 64, 32)
        self.projection_head_momentum.load_state_dict(self.projection_head.state_dict())
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def training_step(self, batch: Any, index: int) -> Tensor:
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
        return super().training_step(batch, index)

    def forward_momentum(self, x: Tensor) -> Tensor:
        """Return the teacher's projection."""
        projected: Tensor = self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1))
        return projected.detach()

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self(x0), self.forward_momentum(x1))
        return loss


class MMCR(Momentum):
    """A module whose loss gets the views of an image in a separate dimension.

    Its teacher starts with other values than the student. With equal values two singular values of an image's views are
    zero, and the loss has no gradient there: on one device, a relative change of the outputs by 1e-16 changes the
    gradients by a hundredth of the largest one, and of none by more than 1e-14 if the teacher's values differ by 1e-3.
    """

    def __init__(self, head: Callable[..., nn.Module], criterion: Callable[[], nn.Module]) -> None:
        super().__init__(head, criterion)
        with torch.no_grad():
            for parameter in (*self.backbone_momentum.parameters(), *self.projection_head_momentum.parameters()):
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        online = torch.stack([self(x0), self(x1)], dim=1)
        momentum = torch.stack([self.forward_momentum(x0), self.forward_momentum(x1)], dim=1)
        loss: Tensor = self.criterion(online, momentum)
        return loss


class BYOL(Momentum):
    """A module that predicts the teacher's projection."""

    def __init__(self) -> None:
        super().__init__(heads.BYOLProjectionHead, lightly_loss.NegativeCosineSimilarity)
        self.prediction_head = heads.BYOLPredictionHead(32, 64, 32)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        p0, p1 = (self.prediction_head(self(x)) for x in (x0, x1))
        z0, z1 = self.forward_momentum(x0), self.forward_momentum(x1)
        loss: Tensor = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        return loss


class DINO(Momentum):
    """A module that centres the teacher's outputs and freezes the last layer of the projection head at first."""

    def __init__(self) -> None:
        head = partial(heads.DINOProjectionHead, output_dim=48, freeze_last_layer=1)
        super().__init__(head, partial(lightly_loss.DINOLoss, output_dim=48))

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        teacher = [self.forward_momentum(x0), self.forward_momentum(x1)]
        loss: Tensor = self.criterion(teacher, [self(x0), self(x1)], epoch=self.current_epoch)
        return loss

    def on_after_backward(self) -> None:
        self.projection_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


class SwaV(Twins):
    """A module that assigns views to prototypes; each step first normalises the prototypes' weights."""

    def __init__(self) -> None:
        super().__init__(heads.SwaVProjectionHead, lightly_loss.SwaVLoss)
        self.prototypes = heads.SwaVPrototypes(32, n_prototypes=16)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        self.prototypes.normalize()
        high, low = ([self.prototypes(nn.functional.normalize(self(x))) for x in views] for views in self.views(x0, x1))
        loss: Tensor = self.criterion(high, low)
        return loss

    def views(self, x0: Tensor, x1: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the views of high resolution and the views of low resolution."""
        return [x0, x1], [x[..., : SIZE // 2, : SIZE // 2] for x in (x0, x1)]


# By name: a function that makes the module, and whether its loss is a mean over images.
LIGHTLY: dict[str, tuple[Callable[[], LightningModule], bool]] = {
    "SimSiam": (SimSiam, True),
    "BYOL": (BYOL, True),
    "SimCLR": (partial(Twins, heads.SimCLRProjectionHead, lightly_loss.NTXentLoss), False),
    "SimCLR, gather_distributed": (
        partial(Twins, heads.SimCLRProjectionHead, partial(lightly_loss.NTXentLoss, gather_distributed=True)),
        False,
    ),
    "BarlowTwins": (partial(Twins, heads.BarlowTwinsProjectionHead, lightly_loss.BarlowTwinsLoss), False),
    "VICReg": (partial(Twins, heads.VICRegProjectionHead, lightly_loss.VICRegLoss), False),
    "VICReg, gather_distributed": (
        partial(Twins, heads.VICRegProjectionHead, partial(lightly_loss.VICRegLoss, gather_distributed=True)),
        False,
    ),
    "DCL": (partial(Twins, heads.SimCLRProjectionHead, lightly_loss.DCLLoss), False),
    "NNCLR": (NNCLR, False),
    "MoCo": (
        partial(Momentum, heads.MoCoProjectionHead, partial(lightly_loss.NTXentLoss, memory_bank_size=(64, 32))),
        False,
    ),
    "TiCo": (partial(Momentum, heads.TiCoProjectionHead, lightly_loss.TiCoLoss), False),
    "MMCR": (partial(MMCR, heads.MMCRProjectionHead, lightly_loss.MMCRLoss), False),
    "DINO": (DINO, True),
    "SwaV": (SwaV, False),
}


def lightly_entry(name: str) -> Entry:
    make, is_mean = LIGHTLY[name]
    return Entry(make, lambda: images_and_labels(SIZE), is_mean)


@pytest.mark.parametrize("name", part_of(LIGHTLY))
def test_lightly(name: str) -> None:
    try_all(f"lightly.{name}", lightly_entry(name))
