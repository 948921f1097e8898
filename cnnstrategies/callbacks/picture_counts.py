"""Counts of an evaluation for its pictures: tensors of fixed size on the device, which no batch reads on the host."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

WORST = 16  # Number of worst mistakes that are kept.
BINS = 15  # Number of bins of the reliability diagram.
MOST_CLASSES = 1000  # Largest number of classes with a confusion matrix, which then has 8 MB.
POINTS = 2048  # Largest number of samples that the picture of a regression shows for each rank.
LONGEST = 256  # Largest height and width of the masks that are kept, in pixels.

State = Mapping[str, Tensor]


class PictureCounts(Metric):
    """Base class of the counts of one task.

    Metrics are used because every strategy knows their states. The ranks' states are merged by :meth:`merged`, once
    after the evaluation.

    The worst mistakes are a table of `WORST` rows: ``worst_values`` has the size of the mistake, which is minus
    infinity in unused rows, and two more numbers; ``worst_rows`` has the sample's index and two integers, which depend
    on the task. Without mistakes, all rows are unused.

    Args:
        outputs: Number of the network's outputs for an image or pixel.
    """

    worst_values: Tensor
    worst_rows: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.outputs = outputs
        self.add_state("worst_values", torch.full((WORST, 3), -math.inf))
        self.add_state("worst_rows", torch.full((WORST, 3), -1))

    @override
    def update(self, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
        """Count a batch.

        States get new tensors and are not changed in place, because ranks without the outputs do not have the values.

        Args:
            logits: The network's main outputs (N, outputs, ...).
            targets: The batch's targets.
            indices: Index of each sample in its data set (N,), or -1 if the indices are not known.
        """
        raise NotImplementedError

    @override
    def compute(self) -> dict[str, Tensor]:
        """Return the states of this rank by name."""
        return {name: getattr(self, name) for name in self._defaults}

    def merged(self, states: State) -> dict[str, Tensor]:
        """Return the state of all ranks.

        Args:
            states: The states, each with the ranks as an additional first dimension.
        """
        result = {name: state.sum(0) for name, state in states.items()}
        values, rows = states["worst_values"].flatten(0, 1), states["worst_rows"].flatten(0, 1)
        order = self.order_of_worst(values[:, 0])
        return result | {"worst_values": values[order], "worst_rows": rows[order]}

    def order_of_worst(self, scores: Tensor) -> Tensor:
        """Return the positions of the worst samples, the worst first."""
        return scores.topk(WORST).indices

    def _keep_worst(self, scores: Tensor, values: tuple[Tensor, Tensor], rows: tuple[Tensor, ...]) -> Tensor:
        """Compare a batch with the worst mistakes so far.

        Args:
            scores: Size of each sample's mistake (N,); minus infinity if the sample is not a mistake.
            values: Two more numbers of each sample.
            rows: Index of each sample, and two more integers.

        Returns:
            Positions of the rows that are kept, among the rows so far and the batch's samples.
        """
        scores = scores.nan_to_num(nan=-math.inf, neginf=-math.inf)
        all_values = torch.cat([self.worst_values, torch.stack([scores, *values], 1).float()])
        all_rows = torch.cat([self.worst_rows, torch.stack(rows, 1)])
        order = self.order_of_worst(all_values[:, 0])
        self.worst_values, self.worst_rows = all_values[order], all_rows[order]
        return order


class ClassCounts(PictureCounts):
    """Counts of the task ``classes``.

    A mistake is an image with a wrong most probable class. Its size is the cross-entropy, its numbers are the
    probability of the predicted and of the true class, and its integers are the two classes.
    """

    confusion: Tensor
    bins: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        # Rows are true classes, and columns are predicted classes. With too many classes the matrix is empty.
        side = outputs if outputs <= MOST_CLASSES else 0
        self.add_state("confusion", torch.zeros(side, side, dtype=torch.int64))
        self.add_state("bins", torch.zeros(3, BINS))

    @override
    def update(self, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
        logits = logits.float()
        targets = targets.argmax(1) if targets.ndim == 2 else targets
        counted = (targets >= 0) & (targets < self.outputs)  # Losses ignore other values, such as -100.
        targets = targets.clamp(0, self.outputs - 1)
        probabilities = logits.softmax(1).nan_to_num()
        confidence, predicted = probabilities.max(1)
        right = predicted == targets
        self.confusion = add_confusion(self.confusion, targets, predicted, counted)
        self.bins = self.bins + binned(confidence, right, counted)
        losses = F.cross_entropy(logits, targets, reduction="none").masked_fill(right | ~counted, -math.inf)
        of_target = probabilities.gather(1, targets[:, None])[:, 0]
        self._keep_worst(losses, (confidence, of_target), (indices, predicted, targets))


class LabelCounts(PictureCounts):
    """Counts of the task ``multilabel``.

    A mistake is an image with a wrong label. Its size is the largest binary cross-entropy of a wrong label, its first
    number is the probability of this label, and its integers are the label and whether the image has the label.
    """

    confusion: Tensor
    bins: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.add_state("confusion", torch.zeros(outputs, 2, 2, dtype=torch.int64))  # Label, is there, is predicted.
        self.add_state("bins", torch.zeros(3, BINS))

    @override
    def update(self, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
        logits, present = logits.float(), targets >= 0.5
        probabilities = logits.sigmoid().nan_to_num()
        predicted = probabilities >= 0.5
        kinds = ((~present, ~predicted), (~present, predicted), (present, ~predicted), (present, predicted))
        counts = torch.stack([(true & answer).sum(0) for true, answer in kinds], 1)
        self.confusion = self.confusion + counts.reshape(-1, 2, 2)
        ones = torch.ones_like(present)
        self.bins = self.bins + binned(probabilities.flatten(), present.flatten(), ones.flatten())
        losses = F.binary_cross_entropy_with_logits(logits, present.float(), reduction="none")
        scores, labels = losses.masked_fill(predicted == present, -math.inf).nan_to_num(neginf=-math.inf).max(1)
        probability = probabilities.gather(1, labels[:, None])[:, 0]
        is_there = present.gather(1, labels[:, None])[:, 0].long()
        self._keep_worst(scores, (probability, probability), (indices, labels, is_there))


class ValueCounts(PictureCounts):
    """Counts of the task ``regression``.

    The size of a mistake is the sum of the squared errors, its numbers are the true and the predicted value of the
    output with the largest error, and its first integer is this output.
    """

    errors: Tensor
    points: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__(outputs)
        self.add_state("errors", torch.zeros(4, outputs))  # Samples, and sums of errors, absolute and squared errors.
        self.add_state("points", torch.full((POINTS, 2, outputs), math.nan))  # True and predicted values.
        self._rows, self._stride = 0, 1

    @override
    def update(self, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
        values, targets = logits.float(), targets.float()
        errors = values - targets
        absolute = errors.abs()
        self.errors = self.errors + torch.stack([torch.ones_like(errors), errors, absolute, errors.square()]).sum(1)
        self._keep_points(torch.stack([targets, values], 1))
        output = absolute.nan_to_num().argmax(1)
        true, predicted = (numbers.gather(1, output[:, None])[:, 0] for numbers in (targets, values))
        self._keep_worst(errors.square().sum(1), (true, predicted), (indices, output, output))

    @override
    def reset(self) -> None:
        super().reset()
        self._rows, self._stride = 0, 1

    def _keep_points(self, pairs: Tensor) -> None:
        """Keep every n-th sample. If there are too many, every second one of them is dropped, and n is doubled."""
        count = -(-self._rows // self._stride)
        chosen = pairs[-self._rows % self._stride :: self._stride]
        self._rows += len(pairs)
        points = torch.cat([self.points[:count], chosen])
        while len(points) > POINTS:
            points, self._stride = points[::2], 2 * self._stride
        self.points = torch.cat([points, points.new_full((POINTS - len(points), *points.shape[1:]), math.nan)])

    @override
    def merged(self, states: State) -> dict[str, Tensor]:
        points = states["points"].flatten(0, 1)
        return super().merged(states) | {"points": points[~points.isnan().any(2).any(1)]}


class MaskCounts(PictureCounts):
    """Counts of a segmentation, whose confusion matrix counts pixels.

    A mistake is an image with wrong pixels. Its size is the fraction of the wrong pixels among those that count. Of the
    worst images, the predicted masks are kept, scaled down to at most `LONGEST` pixels.

    Args:
        outputs: Number of classes.
        ignore_index: Value of pixels that do not count; None if all pixels count.
        size: Height and width of the images; None if no masks are kept.
    """

    confusion: Tensor
    masks: Tensor

    def __init__(self, outputs: int, ignore_index: int | None, size: tuple[int, ...] | None) -> None:
        super().__init__(outputs)
        self.ignore_index = ignore_index
        side = outputs if outputs <= MOST_CLASSES else 0
        self.add_state("confusion", torch.zeros(side, side, dtype=torch.int64))
        scale = 1.0 if size is None else min(1.0, LONGEST / max(size))
        self._size = None if size is None or outputs > 256 else [max(1, round(scale * length)) for length in size]
        self.add_state("masks", torch.zeros(WORST, *(self._size or (0, 0)), dtype=torch.uint8))

    @override
    def update(self, logits: Tensor, targets: Tensor, indices: Tensor) -> None:
        predicted = logits.max(1).indices  # On a CPU, argmax takes three times as long.
        counted = (targets >= 0) & (targets < self.outputs)
        if self.ignore_index is not None:
            counted = counted & (targets != self.ignore_index)
        pixels = tuple(range(1, targets.ndim))
        wrong = ((predicted != targets) & counted).sum(pixels)
        fraction = wrong / counted.sum(pixels).clamp(min=1)
        known = targets.clamp(0, self.outputs - 1)
        flat = (known.flatten(), predicted.flatten(), counted.flatten())
        self.confusion = add_confusion(self.confusion, *flat)
        order = self._keep_worst(fraction.masked_fill(wrong == 0, -math.inf), (fraction, fraction), (indices,) * 3)
        if self._size is not None and predicted.ndim == 3:
            small = F.interpolate(predicted[:, None].float(), self._size, mode="nearest")[:, 0].to(torch.uint8)
            self.masks = torch.cat([self.masks, small])[order]

    @override
    def merged(self, states: State) -> dict[str, Tensor]:
        order = self.order_of_worst(states["worst_values"].flatten(0, 1)[:, 0])
        return super().merged(states) | {"masks": states["masks"].flatten(0, 1)[order]}


def counts_for(module: Any, image_shape: tuple[int, ...] | None) -> PictureCounts | None:
    """Return the counts for the task of a module, or None if the module does not declare what the counts need.

    Args:
        module: The module. Its attributes are ``num_classes``, and either ``ignore_index`` for a segmentation, or
            ``task``, which is by default ``classes``.
        image_shape: Shape of an image (C, H, W); None if it is not known.
    """
    outputs, task = getattr(module, "num_classes", None), getattr(module, "task", "classes")
    if not isinstance(outputs, int):
        return None
    if hasattr(module, "ignore_index"):
        size = image_shape[1:] if image_shape is not None and len(image_shape) == 3 else None
        return MaskCounts(outputs, module.ignore_index, size)
    kinds: dict[Any, type[PictureCounts]] = {
        "classes": ClassCounts,
        "multilabel": LabelCounts,
        "regression": ValueCounts,
    }
    return kinds[task](outputs) if task in kinds else None


def add_confusion(confusion: Tensor, targets: Tensor, predicted: Tensor, counted: Tensor) -> Tensor:
    """Return a confusion matrix to which a batch is added. torch's ``bincount`` would wait for the device.

    Args:
        confusion: The matrix (C, C). With too many classes it is empty, and stays so.
        targets: True classes (N,).
        predicted: Predicted classes (N,).
        counted: Whether each element counts (N,).
    """
    if not len(confusion):
        return confusion
    codes = targets * len(confusion) + predicted
    return confusion.flatten().scatter_add(0, codes, counted.long()).reshape(confusion.shape)


def binned(confidence: Tensor, right: Tensor, counted: Tensor) -> Tensor:
    """Return the number of samples, the sum of probabilities, and the number of hits in each bin (3, bins).

    Args:
        confidence: Predicted probability of each sample (N,), in [0, 1].
        right: Whether the prediction is right (N,).
        counted: Whether the sample counts (N,).
    """
    columns = torch.stack([torch.ones_like(confidence), confidence, right.float()]) * counted
    places = (confidence * BINS).long().clamp(max=BINS - 1)
    return torch.zeros(3, BINS, device=confidence.device).scatter_add(1, places.expand(3, -1), columns)
