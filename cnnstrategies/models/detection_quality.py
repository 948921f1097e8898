"""Mean average precision of detections over all ranks, in which each image counts once."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.detection import MeanAveragePrecision
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

Boxes = Mapping[str, Tensor]
Backend = Literal["pycocotools", "faster_coco_eval"]
BACKENDS: tuple[Backend, ...] = ("pycocotools", "faster_coco_eval")
REPORTED = ("map", "map_50", "map_75")


class DetectionQuality(Metric):
    """Metric: COCO's mean average precision of detections.

    The boxes of all images are rows of tensors, of which ranks may have different numbers, and torchmetrics computes
    the precision from the rows of all ranks. The states of torchmetrics' own metric are lists of images, which cannot
    be gathered if the ranks have different numbers of images (torchmetrics' issue 3199). An image that is evaluated
    several times counts once, for example an image that a sampler has repeated.
    """

    detected: list[Tensor]
    true: list[Tensor]
    images: list[Tensor]

    def __init__(self) -> None:
        super().__init__(compute_with_cache=False)
        # Rows: x1, y1, x2, y2, label and score; x1, y1, x2, y2, label, crowd and area; whether the image has an
        # identity, the identity, and the image's numbers of rows in the other two states.
        for name in ("detected", "true", "images"):
            self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(self, detections: Sequence[Boxes], targets: Sequence[Boxes]) -> None:
        """Add the images of a batch, which may be empty.

        Args:
            detections: For each image ``boxes`` (n, 4) as x1, y1, x2, y2, ``labels`` (n,) and ``scores`` (n,).
            targets: For each image ``boxes`` (m, 4) and ``labels`` (m,). Optional are ``iscrowd`` (m,), ``area`` (m,),
                and the integer ``image_id``, which tells whether an image has been evaluated before.
        """
        self.detected.append(torch.zeros(0, 6, device=self.device))
        self.true.append(torch.zeros(0, 7, device=self.device))
        self.images.append(torch.zeros(0, 4, device=self.device, dtype=torch.int64))
        for detection, target in zip(detections, targets, strict=True):
            labels = target["labels"]
            crowd = target.get("iscrowd", torch.zeros_like(labels))
            area = target.get("area", torch.zeros_like(labels))  # torchmetrics computes an area of 0 from the box.
            self.detected.append(_rows(detection["boxes"], detection["labels"], detection["scores"]))
            self.true.append(_rows(target["boxes"], labels, crowd, area))
            numbers = [1 if "image_id" in target else 0, 0, len(detection["boxes"]), len(labels)]
            row = torch.tensor(numbers, device=self.device)
            if "image_id" in target:
                row[1] = torch.as_tensor(target["image_id"], device=self.device).reshape(())
            self.images.append(row[None])

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return ``map``, ``map_50`` and ``map_75`` over the images of all ranks, each in [0, 1].

        If no image has a box, the precision is not defined, and the values are -1.
        """
        metric = MeanAveragePrecision(backend=coco_backend(), sync_on_compute=False)
        metric.warn_on_many_detections = False
        detected, true, images = (_joined(rows) for rows in (self.detected, self.true, self.images))
        seen: set[int] = set()
        first_detected = first_true = 0
        for has_identity, identity, of_detected, of_true in images.tolist():
            detection = detected[first_detected : (first_detected := first_detected + of_detected)]
            target = true[first_true : (first_true := first_true + of_true)]
            if has_identity and identity in seen:
                continue
            seen.add(identity)
            metric.update(
                [{"boxes": detection[:, :4], "labels": detection[:, 4].long(), "scores": detection[:, 5]}],
                [
                    {
                        "boxes": target[:, :4],
                        "labels": target[:, 4].long(),
                        "iscrowd": target[:, 5].long(),
                        "area": target[:, 6],
                    }
                ],
            )
        result = metric.compute()
        return {name: result[name] for name in REPORTED}


def coco_backend() -> Backend:
    """Return the installed package with which torchmetrics computes the mean average precision.

    Raises:
        ConfigurationError: None of the two packages is installed.
    """
    for name in BACKENDS:
        if find_spec(name) is not None:
            return name
    raise ConfigurationError(
        "DetectionModule computes the mean average precision with pycocotools, which is not installed: run "
        "pip install 'cnnstrategies[detection]'"
    )


def _rows(boxes: Tensor, *columns: Tensor) -> Tensor:
    """Return one row of dtype float32 for each box: its four coordinates, and a number of each column."""
    return torch.cat([boxes.float().reshape(-1, 4), *(column.float().reshape(-1, 1) for column in columns)], dim=1)


def _joined(rows: list[Tensor] | Tensor) -> Tensor:
    return (rows if isinstance(rows, Tensor) else torch.cat(rows)).cpu()
