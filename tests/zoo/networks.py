"""Published networks under every strategy; `make test-zoo` runs this file."""

from collections.abc import Callable
from functools import partial

import pytest
import segmentation_models_pytorch
import timm
from torch import nn
from torchvision.models import get_model

from tests.zoo.catalogue import SEGMENTATION, SEGMENTATION_MODELS, TIMM, TORCHVISION
from tests.zoo.trial import CLASSES, Classifier, Entry, images_and_labels, part_of, try_all


def segmenter(name: str) -> nn.Module:
    kind: Callable[..., nn.Module] = getattr(segmentation_models_pytorch, name)
    return kind("resnet18", encoder_weights=None, in_channels=3, classes=CLASSES)


def timm_network(name: str) -> nn.Module:
    network = timm.create_model(name, num_classes=CLASSES)
    if name == "inception_v3":
        # With its own random weights, the loss of this network is NaN in the second step, which would show nothing.
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                layer.reset_parameters()
    return network


# With its own random weights, the loss of this network is NaN from the first step on.
TORCHVISION_OPTIONS = {"inception_v3": {"init_weights": False}}
# By name: a function that makes the network, the size of its images, and whether its targets are masks.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    **{f"timm.{name}": (partial(timm_network, name), TIMM[name], False) for name in TIMM},
    **{
        f"torchvision.{name}": (
            partial(get_model, name, num_classes=CLASSES, **TORCHVISION_OPTIONS.get(name, {})),
            TORCHVISION[name],
            False,
        )
        for name in TORCHVISION
    },
    **{
        f"torchvision.{name}": (partial(get_model, name, weights_backbone=None, num_classes=CLASSES), 96, True)
        for name in SEGMENTATION
    },
    **{
        f"segmentation_models_pytorch.{name}": (partial(segmenter, name), SEGMENTATION_MODELS[name], True)
        for name in SEGMENTATION_MODELS
    },
}


def entry(name: str) -> Entry:
    make, size, masks = NETWORKS[name]
    return Entry(lambda: Classifier(make()), lambda: images_and_labels(size, masks))


@pytest.mark.parametrize("name", part_of(NETWORKS))
def test_network(name: str) -> None:
    try_all(name, entry(name))
