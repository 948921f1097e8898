"""Boxes from COCO json, Pascal VOC xml and YOLO text files; every mistake is one line with its place and a remedy."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cnnstrategies import ConfigurationError
from cnnstrategies.data import DetectionFolderDataModule, SyntheticDetectionDataModule
from cnnstrategies.data.boxes import BoxRules, ReadBox, ReadImage, corners_of, targets_of
from cnnstrategies.data.image_folder import images_of_folder

pytestmark = pytest.mark.light

# Boxes of each image as x1, y1, x2, y2, with the name of the class. The second image has no boxes.
SIZES = [(20, 30), (16, 16), (24, 18)]
BOXES = [[("cat", (2, 3, 12, 18)), ("dog", (15, 0, 30, 10))], [], [("dog", (4, 6, 14, 22))]]
NAMES = ["cat", "dog"]


def images(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (height, width) in enumerate(SIZES):
        Image.new("RGB", (width, height), (number * 50, 100, 200)).save(folder / f"{number}.png")


def coco(folder: Path, changes=lambda content: None, **annotation) -> None:
    images(folder)
    content = {
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
        "images": [
            {"id": 100 + number, "file_name": f"{number}.png", "height": height, "width": width}
            for number, (height, width) in enumerate(SIZES)
        ],
        "annotations": [
            {
                "image_id": 100 + number,
                "category_id": 17 + NAMES.index(name),
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                **annotation,
            }
            for number, boxes in enumerate(BOXES)
            for name, (x1, y1, x2, y2) in boxes
        ],
    }
    changes(content)
    (folder / "boxes.json").write_text(json.dumps(content))


def voc(folder: Path, difficult: int = 0) -> None:
    images(folder)
    (folder / "annotations").mkdir()
    for number, (height, width) in enumerate(SIZES):
        objects = "".join(
            f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
            f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for name, (x1, y1, x2, y2) in BOXES[number]
        )
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        (folder / f"annotations/{number}.xml").write_text(f"<annotation>{size}{objects}</annotation>")


def yolo(folder: Path) -> None:
    images(folder / "images")
    (folder / "labels").mkdir()
    (folder.parent / "data.yaml").write_text("names: {0: cat, 1: dog}")
    for number, (height, width) in enumerate(SIZES):
        lines = [
            f"{NAMES.index(name)} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} "
            f"{(y2 - y1) / height}"
            for name, (x1, y1, x2, y2) in BOXES[number]
        ]
        if lines:
            (folder / f"labels/{number}.txt").write_text("\n".join(lines))


def module(root="data", **options):
    data = DetectionFolderDataModule(Path(root), num_workers=0, **{"augment": False, **options})
    data.setup("fit")
    return data


def refused(match: str, **options) -> None:
    with pytest.raises(ConfigurationError, match=match) as error:
        module(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("write", [coco, voc, yolo])
def test_every_kind_of_file_gives_the_same_boxes(write):
    for part in ("train", "val"):
        write(Path("data") / part)
    data = module(batch_size=3)
    assert data.class_names == ["background", "cat", "dog"]
    assert data.num_classes == 3
    ((sizes, targets),) = data.val_dataloader()
    assert [tuple(image.shape) for image in sizes] == [(3, *size) for size in SIZES]
    assert all(image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1 for image in sizes)
    for target, boxes in zip(targets, BOXES, strict=True):
        expected = torch.tensor([box for _, box in boxes], dtype=torch.float32).reshape(-1, 4)
        torch.testing.assert_close(target["boxes"], expected, rtol=0, atol=1e-4)
        assert target["labels"].tolist() == [1 + NAMES.index(name) for name, _ in boxes]
        torch.testing.assert_close(target["area"], (expected[:, 2:] - expected[:, :2]).prod(1), rtol=0, atol=1e-2)
    assert [int(target["image_id"]) for target in targets] == [0, 1, 2]
    assert "3 boxes, 1 images without boxes" in data.describe("val")
    without = module(batch_size=3, first_label=0)
    assert (without.num_classes, without.class_names) == (2, NAMES)
    assert without.val_source.fetch([2])[1][0]["labels"].tolist() == [1]
    assert data.category_of(2) == (18 if write is coco else 2)


def test_the_layouts_of_coco_and_ultralytics_are_found():
    coco(Path("data/train"))
    Path("data/annotations").mkdir()
    Path("data/train/boxes.json").rename("data/annotations/instances_train.json")
    Path("data/annotations/captions_train.json").write_text("{}")
    assert len(module(val_split=0.4).train_source.rows) + len(module(val_split=0.4).val_source.rows) == 3
    shutil.rmtree("data")
    yolo(Path("data/train"))
    Path("data/images").mkdir()
    Path("data/labels").mkdir()
    Path("data/train/images").rename("data/images/train")
    Path("data/train/labels").rename("data/labels/train")
    Path("data/train").rmdir()
    assert len(module(val_split=0.4).train_source.rows) + len(module(val_split=0.4).val_source.rows) == 3


def test_crowds_are_not_trained_and_difficult_boxes_are_not_evaluated():
    for part in ("train", "val"):
        coco(Path("data") / part, iscrowd=1, area=7)
    data = module()
    assert not len(data.train_source.fetch([0])[1][0]["boxes"])
    target = data.val_source.fetch([0])[1][0]
    assert target["iscrowd"].tolist() == [1, 1]
    assert target["area"].tolist() == [7, 7]
    shutil.rmtree("data")
    for part in ("train", "val"):
        voc(Path("data") / part, difficult=1)
    data = module()
    assert len(data.train_source.fetch([0])[1][0]["boxes"]) == 2
    assert data.val_source.fetch([0])[1][0]["iscrowd"].tolist() == [1, 1]


def test_scaled_images_have_one_size_and_their_boxes_return_to_the_files_pixels():
    for part in ("train", "val"):
        coco(Path("data") / part)
    data = module(image_size=64, batch_size=3)
    pictures, targets = next(iter(data.val_dataloader()))
    assert [tuple(picture.shape) for picture in pictures] == [(3, 64, 64)] * 3
    for index, boxes in enumerate(BOXES):
        expected = torch.tensor([box for _, box in boxes], dtype=torch.float32).reshape(-1, 4)
        torch.testing.assert_close(data.boxes_of_image(index, targets[index]["boxes"]), expected, rtol=0, atol=1e-4)
    beyond = data.boxes_of_image(0, torch.tensor([[-5.0, 0.0, 900.0, 900.0]]))
    assert beyond.tolist() == [[0, 0, 30, 20]]
    assert images_of_folder(data, Path("data/val")).fetch([1])[1][0]["boxes"].shape == (0, 4)


def test_transforms_move_boxes_with_their_image():
    for part in ("train", "val"):
        coco(Path("data") / part)
    flipped = module(transforms=[v2.RandomHorizontalFlip(1.0)]).train_source.fetch([0])[1][0]
    assert flipped["boxes"].tolist() == [[18, 3, 28, 18], [0, 0, 15, 10]]
    assert type(flipped["boxes"]) is torch.Tensor
    cropped = module(transforms=[v2.CenterCrop(8)]).train_source.fetch([0])[1][0]  # Columns 11 to 19, rows 6 to 14.
    assert cropped["boxes"].tolist() == [[0, 0, 1, 8], [4, 0, 8, 4]]
    assert cropped["area"].tolist() == [8, 16]
    source = module(transforms=[v2.Normalize([0.5], [0.5])]).train_source
    with pytest.raises(ConfigurationError, match=r"transforms fails for an image of shape \(3, 20, 30\) with 2 boxes"):
        source.fetch([0])


@pytest.mark.parametrize(
    ("numbers", "box_format", "corners"),
    [
        ((1, 2, 5, 8), "xyxy", (1, 2, 5, 8)),
        ((1, 2, 4, 6), "xywh", (1, 2, 5, 8)),
        ((3, 5, 4, 6), "cxcywh", (1, 2, 5, 8)),
    ],
)
def test_formats_of_boxes(numbers, box_format, corners):
    assert corners_of(numbers, box_format) == corners


def test_boxes_outside_of_their_image_are_counted_or_refused_and_never_lost_in_silence():
    def read(numbers, **rules):
        counts: Counter[str] = Counter()
        image = ReadImage(Path("a.png"), (20, 30), [ReadBox("f.json, annotations[3]", "cat", numbers)])
        rows = targets_of(image, NAMES, 1, BoxRules(None, **rules), counts)
        return rows[:, :4].tolist(), dict(counts)

    assert read((1.0, 2.0, 30.0, 20.0)) == ([[1, 2, 30, 20]], {})
    assert read((-1.0, 2.0, 31.0, 9.0)) == ([[0, 2, 30, 9]], {"boxes that were clipped to their image": 1})
    outside = r"f.json, annotations\[3\]: the box from \(-1, 2\) to \(31, 9\) reaches beyond its image of 30 x 20"
    with pytest.raises(ConfigurationError, match=outside):
        read((-1.0, 2.0, 31.0, 9.0), outside="refuse")
    for numbers in ((3.0, 4.0, 3.0, 9.0), (40.0, 2.0, 50.0, 9.0), (-9.0, 2.0, -3.0, 9.0)):
        with pytest.raises(ConfigurationError, match=r"annotations\[3\]: .* has the size 0 within .*empty: drop"):
            read(numbers)
        assert read(numbers, empty="drop")[1]["boxes of size 0"] == 1
        assert not read(numbers, empty="drop")[0]
    with pytest.raises(ConfigurationError, match=r"annotations\[3\]: .* ends before it begins; .*box_format"):
        read((9.0, 4.0, 3.0, 9.0))
    with pytest.raises(ConfigurationError, match="has a number that is not finite"):
        read((9.0, float("nan"), 30.0, 9.0))


def entry(key, number, **values):
    return lambda content: content[key][number].update(values)


COCO_MISTAKES = {
    r"images\[1\]: data/train/9.png does not exist": entry("images", 1, file_name="9.png"),
    r"images\[1\]: the id 100 occurs twice": entry("images", 1, id=100),
    r"images\[2\]: height='tall' is not a number of pixels": entry("images", 2, height="tall"),
    r"categories\[1\]: the id 17 or the name 'dog' occurs twice": entry("categories", 1, name="dog"),
    r"annotations\[1\]: image_id=7 is not listed": entry("annotations", 1, image_id=7),
    r"annotations\[1\]: category_id=3 is not listed": entry("annotations", 1, category_id=3),
    r"annotations\[1\]: the box \[1, 2\] is not four numbers": entry("annotations", 1, bbox=[1, 2]),
    r"annotations\[0\]: bbox is None": entry("annotations", 0, bbox=None),
    "has no list images": lambda content: content.pop("images"),
}


@pytest.mark.parametrize("match", COCO_MISTAKES)
def test_mistakes_in_coco_files_are_named(match):
    coco(Path("data/train"), COCO_MISTAKES[match])
    refused(f"boxes.json.*{match}")


def test_mistakes_in_other_files_are_named():
    Path("data/train").mkdir(parents=True)
    refused("no annotation files for .*train: put one COCO .json file there")
    Path("data/train/boxes.json").write_text('{"images":\n [}')
    refused("boxes.json, line 2: not json")
    coco(Path("data/train"))
    Path("data/train/more.json").write_text("{}")
    refused("data/train could belong to .*boxes.json or .*more.json: leave one json file")
    shutil.rmtree("data/train")
    voc(Path("data/train"))
    voc(Path("data/val"))
    file = Path("data/train/annotations/0.xml")
    text = file.read_text()
    for old, new, match in (
        ("<xmin>2", "<xmin>two", r"0.xml, object 1: <bndbox/xmin> is 'two'; write a number"),
        ("<name>cat", "<name>", r"0.xml, object 1: no name"),
        ("<width>30</width>", "", r"0.xml: <size/width> is None"),
        ("</annotation>", "", r"0.xml, line 1: not xml"),
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', r"0.xml declares a DOCTYPE or an entity"),
    ):
        file.write_text(text.replace(old, new))
        refused(match)
    file.unlink()
    refused(r"0.png has no boxes: write data/train/annotations/0.xml")
    file.write_text(text)
    other = Path("data/val/annotations/2.xml")
    other.write_text(other.read_text().replace("dog", "cow"))
    refused(r"2.xml, object 1: the class 'cow' is not one of the training classes \(cat, dog\)")
    other.write_text(text.replace("<width>30", "<width>31"))
    with pytest.raises(ConfigurationError, match=r"2.png has 18 x 24 pixels, but its boxes are for 31 x 20"):
        module().val_source.fetch([2])


def test_mistakes_in_yolo_files_are_named():
    yolo(Path("data/train"))
    file = Path("data/train/labels/0.txt")
    for line, match in (
        ("0 0.5 0.5 0.2", "0.txt, line 2: '0 0.5 0.5 0.2' is not a class and four numbers"),
        ("0 0.5 0.5 0.2 x", "0.txt, line 2: the box .* is not four numbers"),
        ("2 0.5 0.5 0.2 0.2", "0.txt, line 2: class 2, but there are only 2 names"),
        ("0 15 10 4 5", r"0.txt, line 2: .* has numbers above 1; divide them by the image's width \(30\)"),
    ):
        file.write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
        refused(match)
    Path("data/data.yaml").unlink()
    refused("data has YOLO label files, but no names of classes: write data.yaml")
    Path("data/classes.txt").write_text("cat\ndog\n")
    file.write_text("")
    assert module(val_split=0.4).left_out["label files that do not exist, so that their images have no boxes"] == 1


def test_shapes_fit_their_boxes_and_follow_the_seed():
    data, same, other = (SyntheticDetectionDataModule(num_samples=40, seed=seed, batch_size=16) for seed in (0, 0, 1))
    for entry in (data, same, other):
        entry.setup("fit")
    pictures, targets = data.train_source.fetch(list(range(40)))
    assert torch.equal(pictures[3], same.train_source.fetch([3])[0][0])
    assert not torch.equal(pictures[3], other.train_source.fetch([3])[0][0])
    assert not len(targets[7]["boxes"])
    assert {label for target in targets for label in target["labels"].tolist()} == {1, 2, 3}
    for picture, target in zip(pictures, targets, strict=True):
        outside = torch.ones(64, 64, dtype=torch.bool)
        for x1, y1, x2, y2 in target["boxes"].int().tolist():
            bright = picture[:, y1:y2, x1:x2].amin(0) >= 0.5
            assert bright.any(0).all()
            assert bright.any(1).all()
            outside[y1:y2, x1:x2] = False
        assert picture[:, outside].max() < 0.5
    (batch, boxes), *_ = data.train_dataloader()
    assert isinstance(batch, list)
    assert len(batch) == len(boxes) == 16
