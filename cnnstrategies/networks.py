"""CNNs that are not in torchvision: two networks for small images, and the U-Net."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """Plain CNN for small images: blocks of convolutions, global average pooling, and one linear layer.

    A block has two 3 x 3 convolutions, each with batch normalisation and ReLU. Between blocks, max pooling halves the
    height and width. The input is (N, in_channels, H, W), the output (N, num_classes) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images: 1 for greyscale, 3 for colour.
        widths: Number of channels of each block. H and W must be at least ``2 ** (len(widths) - 1)``.
        dropout: Dropout probability before the linear layer.

    Raises:
        ValueError: ``widths`` is empty.
    """

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 1,
        widths: Sequence[int] = (32, 64),
        dropout: float = 0.1,
    ) -> None:
        if not widths:
            raise ValueError("SmallCNN got widths=[]: set the channels of at least one block, for example [32, 64]")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for index, width in enumerate(widths):
            if index:
                layers[f"pool{index}"] = nn.MaxPool2d(2)
            layers[f"block{index + 1}"] = nn.Sequential(
                _convolution(channels, width), nn.ReLU(), _convolution(width, width), nn.ReLU()
            )
            channels = width
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["dropout"] = nn.Dropout(dropout)
        layers["classifier"] = nn.Linear(channels, num_classes)
        super().__init__(layers)


class BasicBlock(nn.Module):
    """Residual block: two 3 x 3 convolutions and a shortcut without parameters.

    If the shape changes, the shortcut subsamples the image and pads the channels with zeros (option A of He et al.
    2016).
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body1 = _convolution(in_channels, channels, stride)
        self.body2 = _convolution(channels, channels)
        self.stride = stride
        self.padding = channels - in_channels

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, ceil(H / stride), ceil(W / stride))."""
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.padding))
        return F.relu(self.body2(F.relu(self.body1(images))) + shortcut)


class SmallResNet(nn.Sequential):
    """Residual network for images of 32 x 32 pixels (He et al., "Deep Residual Learning for Image Recognition", 2016).

    The network of section 4.2 has one convolution, three groups of ``blocks`` residual blocks with 16, 32 and 64
    channels, global average pooling and one linear layer. Its depth is ``6 * blocks + 2``. The input is
    (N, in_channels, H, W), the output (N, num_classes) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        blocks: Number of residual blocks in each group: 3 for ResNet-20, 9 for ResNet-56.
    """

    def __init__(self, num_classes: int, in_channels: int = 3, blocks: int = 3) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(in_channels, 16), relu=nn.ReLU())
        channels = 16
        for group, width in enumerate((16, 32, 64), start=1):
            members = []
            for index in range(blocks):
                members.append(BasicBlock(channels, width, stride=2 if group > 1 and index == 0 else 1))
                channels = width
            layers[f"group{group}"] = nn.Sequential(*members)
        layers["average"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["classifier"] = nn.Linear(channels, num_classes)
        super().__init__(layers)


def _convolution(in_channels: int, channels: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(channels)
    )


class UNet(nn.Module):
    """U-Net (Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", 2015).

    Unlike in the paper, the convolutions are padded, so that the output has the size of the input, and each convolution
    is followed by batch normalisation. The input is (N, in_channels, H, W), the output (N, num_classes, H, W) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the images.
        widths: Number of channels at each resolution, from the highest to the lowest resolution. Each resolution is
            half of the previous one. H and W must be divisible by ``2 ** (len(widths) - 1)``.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 3, widths: Sequence[int] = (64, 128, 256, 512, 1024)
    ) -> None:
        super().__init__()
        channels = [in_channels, *widths]
        self.down = nn.ModuleList(_two_convolutions(*pair) for pair in itertools.pairwise(channels))
        pairs = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, stride=2) for low, high in pairs)
        self.up = nn.ModuleList(_two_convolutions(2 * high, high) for _, high in pairs)
        self.classifier = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, num_classes, H, W)."""
        skipped = [self.down[0](images)]
        for block in self.down[1:]:
            skipped.append(block(F.max_pool2d(skipped[-1], 2)))
        features = skipped.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            features = block(torch.cat([skipped.pop(), enlarge(features)], dim=1))
        logits: Tensor = self.classifier(features)
        return logits


def _two_convolutions(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(_convolution(in_channels, channels), nn.ReLU(), _convolution(channels, channels), nn.ReLU())
