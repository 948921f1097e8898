"""Counts of a detection for its pictures: the images with the most missing and wrong boxes, and their boxes."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchvision.ops import box_iou
from typing_extensions import override

from cnnstrategies.callbacks.picture_counts import WORST, PictureCounts, State

MOST_BOXES = 30  # Largest number of predicted boxes that are kept for an image, the most confident first.
CONFIDENT = 0.5  # Smallest score of a box that counts and is drawn.
OVERLAP = 0.5  # Smallest intersection over union of a box and an object that it has found.


class BoxCounts(PictureCounts):
    """Counts of a detection.

    The size of a mistake is the number of an image's objects without a box, plus the number of its boxes without an
    object of their class. These two numbers are also the numbers of a mistake, and its integers are the index.
    """

    boxes: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        # x1, y1, x2, y2, label and score. Unused rows have the score 0.
        self.add_state("boxes", torch.zeros(WORST, MOST_BOXES, 6))

    @override
    def update(  # type: ignore[override]
        self, detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], indices: Tensor
    ) -> None:
        """Count a batch.

        Args:
            detections: ``boxes`` (n, 4), ``labels`` and ``scores`` (n,) of each image.
            targets: ``boxes`` (m, 4) and ``labels`` (m,) of each image, and optionally ``iscrowd`` (m,).
            indices: Index of each image in its data set (N,), or -1 if the indices are not known.
        """
        for detection, target, index in zip(detections, targets, indices, strict=True):
            order = detection["scores"].argsort(descending=True)[:MOST_BOXES]
            boxes, labels, scores = (detection[name][order].float() for name in ("boxes", "labels", "scores"))
            confident = scores >= CONFIDENT
            counted = target.get("iscrowd", torch.zeros_like(target["labels"])) == 0
            overlap = box_iou(target["boxes"].float(), boxes) >= OVERLAP
            fits = overlap & (target["labels"][:, None] == labels) & confident
            missing = (counted & ~fits.any(1)).sum().float()
            wrong = (confident & ~fits.any(0)).sum().float()
            rows = torch.zeros(1, MOST_BOXES, 6, device=boxes.device)
            rows[0, : len(order)] = torch.cat([boxes, labels[:, None], (scores * confident)[:, None]], 1)
            total = missing + wrong
            score = total.masked_fill(total == 0, -torch.inf)
            kept = self._keep_worst(score[None], (missing[None], wrong[None]), (index[None],) * 3)
            self.boxes = torch.cat([self.boxes, rows])[kept]

    @override
    def merged(self, states: State) -> dict[str, Tensor]:
        order = self.order_of_worst(states["worst_values"].flatten(0, 1)[:, 0])
        return super().merged(states) | {"boxes": states["boxes"].flatten(0, 1)[order]}
