"""The networks that the pipeline benchmarks train, each a Sequential so that a peer can slice it too."""

import torch
import torchvision
from torch import nn

from cnnstrategies.networks import SmallResNet


def vgg_like() -> nn.Sequential:
    """VGG-11 with batch normalisation for 32 x 32 images and 100 classes."""
    features = torchvision.models.vgg11_bn().features
    head = [nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100)]
    return nn.Sequential(*features, *head)


def resnet_like() -> nn.Sequential:
    """ResNet-20 for 32 x 32 images and 10 classes."""
    return SmallResNet(10)


def resnet_blocks() -> nn.Sequential:
    """The same, with a child for each block, so that a peer can be cut after any of them."""
    blocks: list[nn.Module] = []
    for child in SmallResNet(10):
        blocks += child if isinstance(child, nn.Sequential) else [child]
    return nn.Sequential(*blocks)


def mobilenet() -> nn.Module:
    """MobileNetV3-Small for 100 classes; without dropout."""
    return torchvision.models.mobilenet_v3_small(num_classes=100, dropout=0.0)


def alexnet() -> nn.Module:
    """AlexNet as torchvision has it, 61 million parameters; without dropout, so that runs can be compared."""
    return torchvision.models.alexnet(dropout=0.0)


def vgg16() -> nn.Module:
    """VGG-16 as torchvision has it, 138 million parameters; without dropout."""
    return torchvision.models.vgg16(dropout=0.0)


def images(size: int, samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images (samples, 3, size, size) and targets (samples,), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(samples, 3, size, size, generator=generator),
        torch.randint(classes, (samples,), generator=generator),
    )
