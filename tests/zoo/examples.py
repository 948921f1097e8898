"""Published losses, heads and memories under every strategy, put into modules as their packages' examples do."""

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
from trial import CLASSES, images_and_labels, part_of, try_all

SIZE, FEATURES = 32, 96


class Example(LightningModule):
    """What the examples have in common."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Metric(Example):
    """Embeddings, and a loss of them."""

    def __init__(self, loss: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.trunk = timm.create_model("test_resnet", num_classes=16)
        self.loss = loss()

    def training_step(self, batch: Any, index: int) -> Tensor:
        value: Tensor = self.loss(self.trunk(batch[0]), batch[1])
        self.log("loss", value)
        return value


def with_proxies(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """A loss that has weights of its own."""
    return partial(kind, num_classes=CLASSES, embedding_size=16)


# The losses, and whether they are means over images.
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


@pytest.mark.parametrize("name", part_of(METRIC_LEARNING))
def test_pytorch_metric_learning(name: str) -> None:
    loss, is_mean = METRIC_LEARNING[name]
    batch = 4 if is_mean else 12  # Each with pairs.
    try_all(
        f"pytorch_metric_learning.{name}",
        lambda: Metric(loss),
        lambda: images_and_labels(SIZE, batch=batch),
        is_mean,
    )


class Twins(Example):
    """Two views of each image, and a loss of their projections."""

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
        """The loss of two views."""
        loss: Tensor = self.criterion(self(x0), self(x1))
        return loss


class SimSiam(Twins):
    """The other view's projection is predicted."""

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
    """Their nearest neighbours of a memory are."""

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
    """A teacher that follows the student before each step gives the other projection."""

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
        """What the teacher gives."""
        projected: Tensor = self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1))
        return projected.detach()

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self(x0), self.forward_momentum(x1))
        return loss


class MMCR(Momentum):
    """The loss has the views of an image in a dimension of their own."""

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        online = torch.stack([self(x0), self(x1)], dim=1)
        momentum = torch.stack([self.forward_momentum(x0), self.forward_momentum(x1)], dim=1)
        loss: Tensor = self.criterion(online, momentum)
        return loss


class BYOL(Momentum):
    """The teacher's is predicted."""

    def __init__(self) -> None:
        super().__init__(heads.BYOLProjectionHead, lightly_loss.NegativeCosineSimilarity)
        self.prediction_head = heads.BYOLPredictionHead(32, 64, 32)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        p0, p1 = (self.prediction_head(self(x)) for x in (x0, x1))
        z0, z1 = self.forward_momentum(x0), self.forward_momentum(x1)
        loss: Tensor = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        return loss


class DINO(Momentum):
    """The teacher's outputs are centred, and the last layer is frozen at first."""

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
    """Views are assigned to prototypes, whose weights each step begins with normalising."""

    def __init__(self) -> None:
        super().__init__(heads.SwaVProjectionHead, lightly_loss.SwaVLoss)
        self.prototypes = heads.SwaVPrototypes(32, n_prototypes=16)

    def compare(self, x0: Tensor, x1: Tensor) -> Tensor:
        self.prototypes.normalize()
        high, low = ([self.prototypes(nn.functional.normalize(self(x))) for x in views] for views in self.views(x0, x1))
        loss: Tensor = self.criterion(high, low)
        return loss

    def views(self, x0: Tensor, x1: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Those of high, and those of low resolution."""
        return [x0, x1], [x[..., : SIZE // 2, : SIZE // 2] for x in (x0, x1)]


# How to make a module, and whether its loss is a mean over images.
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


@pytest.mark.parametrize("name", part_of(LIGHTLY))
def test_lightly(name: str) -> None:
    make, is_mean = LIGHTLY[name]
    try_all(f"lightly.{name}", make, lambda: images_and_labels(SIZE), is_mean)
