"""CNNs that torchvision and timm do not have: two for small images, and the U-Net."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmallCNN(nn.Sequential):
    """A plain CNN for images from 8 x 8 pixels: convolution blocks, global average pooling, one linear layer.

    Each block is two 3 x 3 convolutions with batch normalisation and ReLU; between blocks the image is halved by
    max pooling. Input (N, in_channels, H, W), output (N, num_classes) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images: 1 for grey, 3 for colour.
        widths: Channels of each block. H and W must be at least ``2 ** (len(widths) - 1)``.
        dropout: Probability of dropping a feature before the linear layer.

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
            raise ValueError("SmallCNN got widths=[]: name the channels of at least one block, for example [32, 64]")
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
    """Two 3 x 3 convolutions with a shortcut; if the shape changes, the shortcut subsamples and zero-pads.

    This is option A of He et al. 2016, so the shortcut has no parameters.
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
    """The residual network for 32 x 32 images of He et al., "Deep Residual Learning for Image Recognition" (2016).

    Section 4.2: one convolution, three groups of ``blocks`` residual blocks with 16, 32 and 64 channels, global
    average pooling, one linear layer; depth ``6 * blocks + 2``. Input (N, in_channels, H, W), output
    (N, num_classes) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        blocks: Residual blocks in each group: 3 gives ResNet-20, 9 gives ResNet-56.
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
    """The network of Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015).

    The convolutions are padded, so the output is as large as the input, and followed by batch normalisation. Input
    (N, in_channels, H, W), output (N, num_classes, H, W) logits.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        widths: Channels at each resolution, from the full resolution to the lowest; each halves the resolution before.
            H and W must be divisible by ``2 ** (len(widths) - 1)``.
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
