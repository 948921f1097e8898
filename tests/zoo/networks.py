"""Published networks under every strategy; `make test-zoo` runs it."""

import pytest
import segmentation_models_pytorch
import timm
import torchvision
from catalogue import SEGMENTATION, SEGMENTATION_MODELS, TIMM, TORCHVISION
from trial import CLASSES, Classifier, images_and_labels, part_of, try_all


@pytest.mark.parametrize("name", part_of(TIMM))
def test_timm(name: str) -> None:
    def make() -> Classifier:
        return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES))

    try_all(f"timm.{name}", make, lambda: images_and_labels(TIMM[name]))


@pytest.mark.parametrize("name", part_of(TORCHVISION))
def test_torchvision(name: str) -> None:
    def make() -> Classifier:
        return Classifier(torchvision.models.get_model(name, num_classes=CLASSES))

    try_all(f"torchvision.{name}", make, lambda: images_and_labels(TORCHVISION[name]))


@pytest.mark.parametrize("name", part_of(SEGMENTATION))
def test_torchvision_segmentation(name: str) -> None:
    def make() -> Classifier:
        return Classifier(torchvision.models.get_model(name, weights_backbone=None, num_classes=CLASSES))

    try_all(f"torchvision.{name}", make, lambda: images_and_labels(96, masks=True))


@pytest.mark.parametrize("name", part_of(SEGMENTATION_MODELS))
def test_segmentation_models_pytorch(name: str) -> None:
    def make() -> Classifier:
        kind = getattr(segmentation_models_pytorch, name)
        return Classifier(kind("resnet18", encoder_weights=None, in_channels=3, classes=CLASSES))

    try_all(
        f"segmentation_models_pytorch.{name}", make, lambda: images_and_labels(SEGMENTATION_MODELS[name], masks=True)
    )
