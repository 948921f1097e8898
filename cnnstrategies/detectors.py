"""A small detector for small images, which trains on a CPU."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead

GROUPS = 4  # Groups of channels that are normalised together; batches of detectors are too small for BatchNorm.


class SmallBackbone(nn.Module):
    """Convolutions that return feature maps of two resolutions, the second with information from below.

    Each block has a 3 x 3 convolution with stride 2 and one with stride 1, each with group normalisation and ReLU. The
    last two blocks' outputs are the feature maps, which get ``widths[-1]`` channels each.

    Args:
        in_channels: Number of channels of the images.
        widths: Number of channels of each block, multiples of 4; at least two blocks.
    """

    def __init__(self, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        channels = [in_channels, *widths]
        self.blocks = nn.ModuleList(
            nn.Sequential(_convolution(before, after, 2), _convolution(after, after, 1))
            for before, after in pairwise(channels)
        )
        self.lateral = nn.Conv2d(widths[-2], widths[-1], 1)
        self.out_channels = widths[-1]

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Return feature maps of (N, in_channels, H, W) images: ``fine`` and ``coarse``, (N, widths[-1], ...)."""
        maps = [images]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        fine = self.lateral(maps[-2])
        fine = fine + F.interpolate(maps[-1], size=fine.shape[-2:], mode="nearest")
        return OrderedDict(fine=fine, coarse=maps[-1])


class SmallRetinaNet(RetinaNet):  # type: ignore[misc]
    """RetinaNet (Lin et al., "Focal Loss for Dense Object Detection", 2017) for small images, without BatchNorm.

    Its loss is a mean over images. The convolutions of its heads have group normalisation, as those of torchvision's
    ``retinanet_resnet50_fpn_v2``. Its backbone is a :class:`SmallBackbone`, whose feature maps have a quarter and an
    eighth of the images' resolution if ``widths`` has three entries. The first map finds objects of 8 to 16 pixels, and
    the second of 16 to 32 pixels.

    Args:
        num_classes: Number of classes, including the background.
        image_size: Shorter side to which images are resized, in pixels, and largest side.
        in_channels: Number of channels of the images.
        widths: Number of channels of each block of the backbone, multiples of 4.
    """

    def __init__(
        self, num_classes: int, image_size: int = 64, in_channels: int = 3, widths: Sequence[int] = (16, 32, 64)
    ) -> None:
        scale = 2 ** len(widths) // 2
        sizes = tuple((2 * scale * factor, 3 * scale * factor) for factor in (1, 2))
        anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 2)
        # Without normalisation in the heads, gradients with norms up to 1,285 were measured during the warm-up.
        normalised = partial(nn.GroupNorm, GROUPS)
        head = RetinaNetHead(widths[-1], anchors.num_anchors_per_location()[0], num_classes, norm_layer=normalised)
        super().__init__(
            SmallBackbone(in_channels, widths),
            num_classes,
            min_size=image_size,
            max_size=image_size,
            image_mean=[0.5] * in_channels,
            image_std=[0.25] * in_channels,
            anchor_generator=anchors,
            head=head,
        )


def _convolution(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(GROUPS, channels),
        nn.ReLU(),
    )
