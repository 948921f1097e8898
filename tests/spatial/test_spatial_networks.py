"""Networks train on divided images with the losses, gradients and running statistics of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.equality import check_training
from tests.spatial.spatial_networks import ResNet, UNet


@pytest.mark.light
@pytest.mark.parametrize(("count", "height"), [(2, 64), (3, 41)])
def test_residual_network_trains_as_on_one_process(count: int, height: int) -> None:
    torch.manual_seed(count)
    images = torch.randn(2, 3, height, 40, dtype=torch.float64)
    targets = torch.tensor([1, 3])
    assert not check_training(ResNet().double(), images, targets, F.cross_entropy, count, has_maps=False)


@pytest.mark.light
@pytest.mark.parametrize(("mode", "count", "height"), [("transposed", 2, 32), ("bilinear", 3, 37)])
def test_unet_trains_as_on_one_process(mode: str, count: int, height: int) -> None:
    torch.manual_seed(count)
    images = torch.randn(2, 3, height, 24, dtype=torch.float64)
    targets = torch.randint(0, 3, (2, height, 24))
    targets[0, 3:5] = 255

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        return F.cross_entropy(scores, targets, weight, ignore_index=255) + scores.square().mean()

    assert not check_training(UNet(mode).double(), images, targets, loss, count, has_maps=True)
