"""Predicted boxes become COCO json in the pixels of the files, and pictures of the images with most mistakes."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import Tensor

from cnnstrategies.callbacks import PredictionWriter
from cnnstrategies.callbacks.picture_files import Evaluated, write_pictures
from cnnstrategies.callbacks.pictures import BoxCounts
from cnnstrategies.data import DetectionFolderDataModule, SyntheticDetectionDataModule

pytestmark = pytest.mark.light


def boxes(*corners: tuple[float, ...], labels: list[int], scores: list[float] | None = None) -> dict[str, Tensor]:
    result = {"boxes": torch.tensor(corners).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64)}
    return result if scores is None else {**result, "scores": torch.tensor(scores)}


def test_the_images_with_most_missing_and_wrong_boxes_are_drawn() -> None:
    data = SyntheticDetectionDataModule(num_samples=60, image_size=48)
    data.setup("test")
    _, targets = data.test_source.fetch([0, 1, 2, 3])
    right = [{**target, "scores": torch.full((len(target["labels"]),), 0.9)} for target in targets]
    wrong_class = {**right[1], "labels": right[1]["labels"] % 3 + 1}
    doubtful = {**right[2], "scores": right[2]["scores"] / 2}
    spurious = boxes((0.0, 0.0, 4.0, 4.0), labels=[1], scores=[0.8])
    ranks = [BoxCounts(0), BoxCounts(0)]
    ranks[0].update([right[0], wrong_class], targets[:2], torch.tensor([0, 1]))
    ranks[1].update([doubtful, spurious], targets[2:], torch.tensor([2, 3]))
    computed = [rank.compute() for rank in ranks]
    states = ranks[0].merged({name: torch.stack([state[name] for state in computed]) for name in computed[0]})
    numbers = [len(target["labels"]) for target in targets]
    expected = {1: (numbers[1], numbers[1]), 2: (numbers[2], 0), 3: (numbers[3], 1)}
    kept = states["worst_values"][:, 0] > 0
    assert {
        int(row[0]): (int(values[1]), int(values[2]))
        for row, values in zip(states["worst_rows"][kept], states["worst_values"][kept], strict=True)
    } == expected
    files = write_pictures(Path(), Evaluated("test", 3, states, data, None))
    assert [file.name for file in files] == ["test_boxes.png", "test_mistakes.csv"]
    with Image.open("test_boxes.png") as picture:
        assert len(set(picture.convert("L").get_flattened_data())) > 20
    with open("test_mistakes.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["sample", "mistake", "missing", "wrong"]
    assert {row[0]: (float(row[2]), float(row[3])) for row in rows} == {
        f"image {index}": numbers for index, numbers in expected.items()
    }


def test_predicted_boxes_are_coco_json_in_the_pixels_of_the_files() -> None:
    folder = Path("data/train")
    folder.mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 20)).save(folder / f"{number}.png")
    images = [{"id": 70 + number, "file_name": f"{number}.png", "height": 20, "width": 40} for number in range(3)]
    annotation = {"image_id": 70, "category_id": 9, "bbox": [2, 3, 10, 5]}
    content = {"categories": [{"id": 9, "name": "cat"}], "images": images, "annotations": [annotation]}
    (folder / "boxes.json").write_text(json.dumps(content))
    Path("data/val").symlink_to("train")
    data = DetectionFolderDataModule(Path("data"), image_size=80, num_workers=0)
    data.setup("predict")
    trainer = SimpleNamespace(world_size=1, is_global_zero=True, datamodule=data)
    writer = PredictionWriter(Path("a.json"))
    predicted = boxes((4.0, 6.0, 24.0, 16.0), (60.0, -2.0, 200.0, 30.0), labels=[1, 1], scores=[0.75, 0.5])
    for indices, detections in (
        ([2, 1], [predicted, boxes(labels=[], scores=[])]),
        ([0], [boxes(labels=[], scores=[])]),
    ):
        outputs = {"index": torch.tensor(indices), "detections": detections}
        writer.on_predict_batch_end(trainer, None, outputs, None, 0)
    writer.on_predict_epoch_end(trainer, None)
    image = {"image_id": 72, "file_name": "val/2.png", "category_id": 9, "category": "cat"}
    assert json.loads(Path("a.json").read_text()) == [
        {**image, "bbox": [2, 3, 10, 5], "score": 0.75},
        {**image, "bbox": [30, 0, 10, 15], "score": 0.5},
    ]
