"""MONAI's networks, for images and for volumes, with MONAI's losses, under every strategy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from monai import losses
from monai.networks import nets
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.trial import CLASSES, Entry, part_of, try_all

SAMPLES = 24


class Segmentation(LightningModule):
    """A module like those of MONAI's tutorials.

    Args:
        network: Network whose output is a tensor, a list of tensors for deep supervision, or these tensors stacked in
            the second dimension.
        loss: Loss of an output, of shape ``(batch, classes, ...)``, and labels, of shape ``(batch, 1, ...)``.
    """

    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.loss_function = network, losses.DeepSupervisionLoss(loss)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        outputs = self.forward(images)
        if isinstance(outputs, Tensor) and outputs.dim() > labels.dim():
            outputs = list(torch.unbind(outputs, dim=1))
        loss: Tensor = self.loss_function(outputs, labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class Classification(Segmentation):
    """A module that classifies images or volumes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, nn.Identity())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.forward(batch[0]), batch[1].flatten(1)[:, 0].long())
        self.log("train_loss", loss)
        return loss


def samples(size: int, dimensions: int) -> DataLoader[Any]:
    """Return a loader of images or volumes of shape ``(1, size, ...)``, and labels of the same shape."""
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, 1, *[size] * dimensions)
    images = torch.randn(shape, generator=generator)
    labels = torch.randint(CLASSES, shape, generator=generator).float()
    return DataLoader(TensorDataset(images, labels), 4)


CHANNELS: dict[str, Any] = {"in_channels": 1, "out_channels": CLASSES}
SMALL: dict[str, Any] = {"hidden_size": 24, "mlp_dim": 32, "num_heads": 2}
LEVELS: dict[str, Any] = CHANNELS | {"channels": (4, 8, 16), "strides": (2, 2)}
FEATURES: dict[str, Any] = CHANNELS | {"features": (4, 4, 8, 8, 16, 4)}
DYNAMIC: dict[str, Any] = CHANNELS | {
    "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [4, 8, 16],
}  # fmt: skip
dice_and_entropy = partial(losses.DiceCELoss, to_onehot_y=True, softmax=True)
dice = partial(losses.DiceLoss, to_onehot_y=True, softmax=True, include_background=False)
whole_batch = partial(losses.DiceLoss, to_onehot_y=True, softmax=True, batch=True)

# By name: functions that make the network and the loss (None for a classifier), and the size and number of the images'
# dimensions.
MONAI: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None, int, int]] = {
    "UNet": (partial(nets.UNet, 2, num_res_units=2, **LEVELS), dice_and_entropy, 32, 2),
    "UNet, Dice loss of the batch": (partial(nets.UNet, 2, **LEVELS), whole_batch, 32, 2),
    "UNet, volumes": (partial(nets.UNet, 3, num_res_units=1, **LEVELS), dice_and_entropy, 16, 3),
    "AttentionUnet": (partial(nets.AttentionUnet, 2, **LEVELS), dice_and_entropy, 32, 2),
    "BasicUNetPlusPlus, deep supervision": (
        partial(nets.BasicUNetPlusPlus, 2, deep_supervision=True, **FEATURES), dice_and_entropy, 32, 2,
    ),
    "SegResNet": (partial(nets.SegResNet, 2, 8, blocks_down=(1, 1), blocks_up=(1,), **CHANNELS), dice, 32, 2),
    "DynUNet, deep supervision, volumes": (
        partial(nets.DynUNet, 3, deep_supervision=True, deep_supr_num=1, **DYNAMIC), dice_and_entropy, 16, 3,
    ),
    "BasicUNet": (partial(nets.BasicUNet, 2, **FEATURES), dice_and_entropy, 32, 2),
    "SegResNetDS, deep supervision": (
        partial(nets.SegResNetDS, 2, 8, blocks_down=(1, 1), dsdepth=2, **CHANNELS), dice, 32, 2,
    ),
    "UNETR": (partial(nets.UNETR, 1, CLASSES, (32, 32), 4, **SMALL, spatial_dims=2), dice_and_entropy, 32, 2),
    "MedNeXt": (
        partial(nets.MedNeXt, 2, 4, 1, CLASSES, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1)), dice, 32, 2,
    ),
    "RegUNet": (
        partial(nets.RegUNet, 2, 1, 4, 2, out_channels=CLASSES, out_kernel_initializer="kaiming_uniform"), dice, 32, 2,
    ),
    "AutoEncoder": (
        partial(nets.AutoEncoder, 2, channels=(4, 8), strides=(2, 2), **CHANNELS), dice_and_entropy, 32, 2,
    ),
    "ResNet, volumes": (
        partial(
            nets.ResNet, "basic", [1, 1, 1, 1], [8, 8, 16, 16], spatial_dims=3, n_input_channels=1, num_classes=CLASSES
        ),
        None, 16, 3,
    ),
    "DenseNet": (
        partial(nets.DenseNet, 2, init_features=8, growth_rate=4, block_config=(2, 2), **CHANNELS), None, 32, 2,
    ),
}  # fmt: skip


def monai_entry(name: str) -> Entry:
    network, loss, size, dimensions = MONAI[name]

    def make() -> LightningModule:
        return Classification(network()) if loss is None else Segmentation(network(), loss())

    return Entry(make, lambda: samples(size, dimensions), loss is not whole_batch)


@pytest.mark.parametrize("name", part_of(MONAI))
def test_monai(name: str) -> None:
    try_all(f"monai.{name}", monai_entry(name))
