"""Torchvision's detectors in a `DetectionModule` under every strategy."""

from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from cnnstrategies import DetectionModule
from tests.zoo.modules import SIZE, Boxes
from tests.zoo.trial import CLASSES, Entry, part_of, try_all

# By name: whether the loss is a mean over images. Faster R-CNN is left out, because it samples boxes at random, and
# SSD300 with VGG-16, because it takes too long; the tests of the package train a smaller SSD.
DETECTORS = {
    "retinanet_resnet50_fpn": True,
    "retinanet_resnet50_fpn_v2": True,
    "fcos_resnet50_fpn": False,
    "ssdlite320_mobilenet_v3_large": False,
}


def pairs(samples: list[dict[str, Tensor]]) -> Any:
    """Return a list of images, and a list of mappings with their boxes."""
    targets = [{"boxes": sample["bbox_xyxy"].float(), "labels": sample["label"]} for sample in samples]
    return [sample["image"] for sample in samples], targets


def detector_entry(name: str) -> Entry:
    def make() -> LightningModule:
        size = {} if name.startswith("ssd") else {"min_size": SIZE, "max_size": SIZE}
        make_network = getattr(torchvision.models.detection, name)
        network = make_network(weights=None, weights_backbone=None, num_classes=CLASSES, **size)
        return DetectionModule(network, CLASSES, partial(torch.optim.SGD, lr=1e-3, momentum=0.9))

    return Entry(make, lambda: DataLoader(Boxes(), 4, collate_fn=pairs), DETECTORS[name])


@pytest.mark.parametrize("name", part_of(DETECTORS))
def test_detectors(name: str) -> None:
    try_all(f"torchvision.{name}", detector_entry(name))
