"""Published networks under every strategy; `make test-zoo` runs it."""

import pytest
import timm
import torch
import torchvision
from catalogue import SEGMENTATION, TIMM, TORCHVISION
from trial import CLASSES, Classifier, images_and_labels, part_of, try_all


@pytest.mark.parametrize("name", part_of(TIMM))
def test_timm(name: str) -> None:
    def make() -> Classifier:
        torch.manual_seed(0)
        return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES))

    try_all(f"timm.{name}", make, lambda: images_and_labels(TIMM[name]))


@pytest.mark.parametrize("name", part_of(TORCHVISION))
def test_torchvision(name: str) -> None:
    def make() -> Classifier:
        torch.manual_seed(0)
        return Classifier(torchvision.models.get_model(name, num_classes=CLASSES))

    try_all(f"torchvision.{name}", make, lambda: images_and_labels(TORCHVISION[name]))


@pytest.mark.parametrize("name", part_of(SEGMENTATION))
def test_torchvision_segmentation(name: str) -> None:
    def make() -> Classifier:
        torch.manual_seed(0)
        return Classifier(torchvision.models.get_model(name, weights_backbone=None, num_classes=CLASSES))

    try_all(f"torchvision.{name}", make, lambda: images_and_labels(96, masks=True))
