"""Counts of evaluations, in batches and over ranks, equal counts by loops; and pictures of each task are drawn."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import Tensor

from cnnstrategies import ImageClassifier, ImageSegmenter
from cnnstrategies.callbacks.picture_counts import POINTS, WORST, PictureCounts, counts_for
from cnnstrategies.callbacks.picture_files import Evaluated, write_pictures
from cnnstrategies.data.loading import TensorSource

SAMPLES, CLASSES = 50, 4
NAMES = ["background", "a long name of a class", "cat", "dog"]


def counted(module: object, logits: Tensor, targets: Tensor, shape: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """Return the counts of samples that two ranks evaluate in batches of unequal sizes."""
    ranks = []
    for rank in range(2):
        counts = counts_for(module, shape)
        assert isinstance(counts, PictureCounts)
        mine = torch.arange(rank, len(logits), 2)
        for part in mine.split(7):
            counts.update(logits[part], targets[part], part)
        ranks.append(counts.compute())
    return counts.merged({name: torch.stack([states[name] for states in ranks]) for name in ranks[0]})


def written(states: dict[str, Tensor], images: Tensor, targets: Tensor, names: list[str]) -> dict[str, list[list[str]]]:
    """Draw the pictures, and return the rows of the tables by name. All pictures show something."""
    source = TensorSource(images, targets)
    source.name = "folder/with a rather long name/image{}.jpg".format
    data = SimpleNamespace(test_source=source, class_names=names)
    ignored = 255 if "masks" in states else None
    tables = {}
    for file in write_pictures(Path(), Evaluated("test", None, states, data, ignored)):
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert len(set(image.convert("L").get_flattened_data())) > 20
        else:
            with file.open(newline="") as text:
                tables[file.stem] = list(csv.reader(text))
    return tables


def test_labels() -> None:
    logits, targets = torch.randn(SAMPLES, CLASSES) * 3, torch.randint(2, (SAMPLES, CLASSES))
    module = SimpleNamespace(num_classes=CLASSES, task="multilabel")
    states = counted(module, logits, targets)
    answers = (logits.double().sigmoid() >= 0.5).long()
    for label in range(CLASSES):
        for true, answer in ((0, 0), (0, 1), (1, 0), (1, 1)):
            number = sum((targets[:, label] == true) & (answers[:, label] == answer))
            assert states["confusion"][label, true, answer] == number
    assert states["bins"][0].sum() == SAMPLES * CLASSES
    assert states["bins"][2].sum() == targets.sum()
    right = torch.where(targets == 1, logits.double().sigmoid(), 1 - logits.double().sigmoid())
    worst = (-right.log() * (answers != targets)).max(1)
    order = worst.values.argsort(descending=True)[:WORST]
    assert states["worst_rows"][:, 0].tolist() == order.tolist()
    assert states["worst_rows"][:, 1].tolist() == worst.indices[order].tolist()
    tables = written(states, torch.randint(256, (SAMPLES, 3, 20, 30), dtype=torch.uint8), targets, NAMES)
    assert tables["test_classes"][1][1] == str(int(targets[:, 0].sum()))
    assert tables["test_mistakes"][1][0] == f"folder/with a rather long name/image{order[0]}.jpg"


def test_values_of_more_samples_than_are_drawn() -> None:
    samples = 2 * POINTS * 2 + 50
    targets = torch.rand(samples, 2)
    values = targets + torch.rand(samples, 2) * torch.tensor([0.1, 2.0])
    module = SimpleNamespace(num_classes=2, task="regression")
    states = counted(module, values, targets)
    assert POINTS < len(states["points"]) <= 2 * POINTS
    pairs = {tuple(row) for row in torch.stack([targets[:, 1], values[:, 1]], 1).tolist()}
    assert {tuple(row) for row in states["points"][:, :, 1].tolist()} <= pairs
    assert len({tuple(row) for row in states["points"][:, :, 1].tolist()}) == len(states["points"])
    squared = (values - targets).square().sum(1)
    assert set(states["worst_rows"][:, 0].tolist()) == set(squared.topk(WORST).indices.tolist())
    tables = written(states, torch.zeros(samples, 2, 8, 8, dtype=torch.uint8), targets, ["x", "y"])
    assert float(tables["test_errors"][2][2]) == pytest.approx(float((values - targets)[:, 1].mean()), rel=1e-4)
    assert tables["test_mistakes"][1][1].startswith("y is ")


def test_masks_with_ignored_pixels_and_a_perfect_image() -> None:
    module = ImageSegmenter(torch.nn.Conv2d(3, CLASSES, 1), CLASSES)
    targets = torch.randint(CLASSES, (9, 30, 40))
    logits = torch.nn.functional.one_hot(targets, CLASSES).movedim(3, 1).float()
    for index in range(1, 9):
        logits[index, :, :index] = torch.randn(CLASSES, index, 40)
    answers = logits.argmax(1)
    targets[:, -2:] = 255
    targets[8] = 255  # Nothing of this image counts, so it is not a mistake.
    states = counted(module, logits, targets, (3, 30, 40))
    kept = targets != 255
    for true in range(CLASSES):
        for answer in range(CLASSES):
            number = sum((targets[kept] == true) & (answers[kept] == answer))
            assert states["confusion"][true, answer] == number
    wrong = [float((answers[index] != targets[index])[kept[index]].float().mean()) for index in range(8)]
    order = sorted(range(1, 8), key=lambda index: -wrong[index])
    assert states["worst_rows"][:7, 0].tolist() == order
    assert states["worst_values"][:7, 0].tolist() == pytest.approx([wrong[index] for index in order])
    assert (states["worst_values"][7:, 0] == -torch.inf).all()
    for row, index in enumerate(order):
        assert torch.equal(states["masks"][row], answers[index].to(torch.uint8))
    tables = written(states, torch.randint(256, (9, 3, 30, 40), dtype=torch.uint8), targets, NAMES)
    assert len(tables["test_mistakes"]) == 1 + 7
    assert tables["test_classes"][0][-1] == "iou"


@pytest.mark.light
def test_modules_that_declare_nothing_have_no_pictures() -> None:
    assert counts_for(torch.nn.Linear(1, 1), None) is None
    assert counts_for(SimpleNamespace(num_classes=3, task="pose"), None) is None
    classifier = ImageClassifier(torch.nn.Linear(1, 3), 3)
    assert counts_for(classifier, None) is not None
    many = counts_for(SimpleNamespace(num_classes=5000), None)
    assert many is not None
    many.update(torch.randn(3, 5000), torch.tensor([1, -100, 4999]), torch.arange(3))
    assert many.compute()["confusion"].numel() == 0
    assert many.compute()["bins"][0].sum() == 2, "the loss does not count the target -100"
