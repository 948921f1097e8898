"""Configurations with which `tune` is measured."""

from typing import Any

import torchvision
from torch import nn

from cnnstrategies.networks import SmallResNet

# Class and arguments of the network, side of the images, classes.
NETWORKS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "ResNet-20": ("networks.resnet_like", {}, 32, 10),
    "VGG-11": ("networks.vgg_like", {}, 32, 100),
    "MobileNetV3-Small": ("networks.mobilenet", {}, 64, 100),
    "ConvNeXt-atto": ("tune_networks.convnext", {}, 64, 100),
}
BATCH = 64
SAMPLES = 1280


def convnext() -> nn.Module:
    """ConvNeXt-atto for 100 classes."""
    import timm

    network: nn.Module = timm.create_model("convnext_atto", num_classes=100)
    return network


def resnet_for_digits(size: int = 16) -> nn.Module:
    """ResNet-20 for grey images of 8 x 8 pixels, shown to it enlarged."""
    return nn.Sequential(nn.Upsample(size=size), SmallResNet(10, in_channels=1))


def vgg_for_digits() -> nn.Module:
    """VGG-11 with batch normalisation for grey images of 8 x 8 pixels, shown to it with 32 x 32 and three channels."""
    features = torchvision.models.vgg11_bn().features
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.Upsample(size=32), *features, nn.Flatten(), nn.Linear(512, 10))


def configuration(network: str) -> dict[str, Any]:
    """One process on synthetic images, as Lightning's defaults have it."""
    path, arguments, size, classes = NETWORKS[network]
    return {
        "seed_everything": 1,
        "trainer": {"accelerator": "cpu", "devices": 1, "strategy": "auto"},
        "model": {
            "class_path": "cnnstrategies.ImageClassifier",
            "init_args": {
                "num_classes": classes,
                "network": {"class_path": path, "init_args": arguments},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01, "momentum": 0.9}},
            },
        },
        "data": {
            "class_path": "cnnstrategies.data.SyntheticDataModule",
            "init_args": {"num_samples": SAMPLES, "num_classes": classes, "image_size": size, "batch_size": BATCH},
        },
    }
