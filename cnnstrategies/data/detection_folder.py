"""Data module for detection: folders of images with COCO json, Pascal VOC xml or YOLO text files."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.data.annotation_files import COCO, VOC, YOLO, read_coco, read_voc, read_yolo, yolo_names
from cnnstrategies.data.boxes import BoxFormat, BoxRules, ReadImage, targets_of
from cnnstrategies.data.detection_source import BoxedImages, DetectionDataset, random_transform
from cnnstrategies.data.folder_module import FolderDataModule, no_directory
from cnnstrategies.data.folders import FILES_END_IN, image_files, part_folders
from cnnstrategies.errors import ConfigurationError

Kind = Literal["auto", "coco", "voc", "yolo"]
BACKGROUND = "background"
SUFFIXES = {VOC: ".xml", YOLO: ".txt"}
FOLDERS = {VOC: ("annotations", "Annotations"), YOLO: ("labels",)}


class DetectionFolderDataModule(FolderDataModule):
    """Data module for images with boxes, in COCO json, Pascal VOC xml or YOLO text files.

    ::

        root/train/*.json, *.jpg                       COCO; the images may be in train/images
        root/annotations/*train*.json, train/*.jpg     COCO; instances_... if there are several
        root/train/*.xml, *.jpg                        Pascal VOC; the xml files may be in train/annotations
        root/train/labels/*.txt, images/*.jpg          YOLO, with data.yaml or classes.txt in root
        root/images/train/*.jpg, labels/train/*.txt    YOLO; Pascal VOC in the same way, with annotations
        root/val/...                                   without val/, val_split of the training images
        root/test/...                                  without test/, the validation images
        root/predict/*.jpg                             without predict/, the test images

    The folder names ``training``, ``valid``, ``validation``, ``dev`` and ``testing`` are also accepted. A batch has a
    list of images, float32 (3, H, W) in [0, 1] and not normalised, and a list of targets with ``boxes`` (n, 4) as x1,
    y1, x2, y2 in pixels and ``labels`` (n,). Images may have no boxes. Crowds (COCO's ``iscrowd``) are not trained, and
    the metrics ignore them and Pascal VOC's ``difficult`` boxes. The start panel shows how many boxes were clipped or
    dropped.

    Args:
        root: Directory of the data set.
        annotations: Kind of the annotation files; by default the kind that is in the training folder.
        box_format: Format of the four numbers of a box: ``xyxy`` (two corners), ``xywh`` (upper left corner, width,
            height) or ``cxcywh`` (centre, width, height). By default COCO's ``xywh``, Pascal VOC's ``xyxy`` and YOLO's
            ``cxcywh``.
        first_label: Label of the first class: 1 if class 0 is the background, as torchvision's Faster R-CNN and SSD
            need it, or 0 without a background. The number of classes includes the background.
        outside: Whether boxes that reach beyond their image are clipped, or refused.
        empty: Whether boxes of size 0 are refused, or dropped.
        image_size: Size to which the longer side of an image is scaled before the image is padded to a square, in
            pixels. By default images keep their sizes, and the network resizes them.
        augment: Whether training images are flipped horizontally with probability 1/2.
        transforms: Additional transforms of training images of torchvision v2, applied to one uint8 image and its boxes
            at a time. Boxes that leave the image are removed.
        **options: Arguments of :class:`~cnnstrategies.data.folder_module.FolderDataModule`: ``val_split``,
            ``num_workers`` and ``bits`` (by default 16), and those of :class:`~cnnstrategies.data.ImageDataModule`.

    Raises:
        ConfigurationError: A directory, an image or an annotation file is missing or cannot be read, or a box is wrong.
            The error names the file, and the line or entry.
    """

    dataset_class: ClassVar = DetectionDataset

    def __init__(
        self,
        root: Path,
        annotations: Kind = "auto",
        box_format: BoxFormat | None = None,
        first_label: Literal[0, 1] = 1,
        outside: Literal["clip", "refuse"] = "clip",
        empty: Literal["refuse", "drop"] = "refuse",
        image_size: int | None = None,
        augment: bool = True,
        transforms: Sequence[nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        if image_size is not None and image_size < 1:
            raise ConfigurationError(f"image_size={image_size}: use at least 1, or leave it out")
        self.first_label = first_label
        self.image_size = image_size
        self.has_equal_sizes = image_size is not None
        self.moved = random_transform(augment, transforms)
        self.train_transform = self.eval_transform = nn.Identity()
        self.apart = not part_folders(self.root).keys() & {"train"} and (self.root / "images").is_dir()
        self.folders = part_folders(self.root / "images" if self.apart else self.root)
        if "train" not in self.folders:
            raise no_directory(self.root / "train")
        self.kind = self._kind_of(self.folders["train"]) if annotations == "auto" else annotations
        self.category_ids: dict[str, Any] = {}  # Number of each class in COCO json, by name.
        self._read(BoxRules(box_format, outside, empty))

    @override
    def setup(self, stage: str) -> None:
        self.places = {part: str(folder) for part, folder in self.folders.items()}
        parts = dict(self.parts)
        self.hold_out(parts)
        self.set_sources(
            {
                part: BoxedImages(
                    self.root, *content, self.image_size, self.moved if part == "train" else None, self.bits
                )
                for part, content in parts.items()
            }
        )

    @override
    def describe(self, part: str) -> str:
        source: Any = getattr(self, f"{part}_source")
        without = int((source.starts.diff() == 0).sum())
        text = f"{super().describe(part)}, {len(source.rows):,} boxes"
        return text + f", {without:,} images without boxes" * (without > 0)

    def unlabelled(self, folder: Path, names: Sequence[str]) -> BoxedImages:
        """Return a source of images without boxes.

        Args:
            folder: Folder of the images.
            names: Paths of the images, relative to the folder.
        """
        images = [ReadImage(folder / name, size_of(folder / name)) for name in names]
        return BoxedImages(folder, images, [torch.zeros(0, 8)] * len(images), self.image_size, None, self.bits)

    def boxes_of_image(self, index: int, boxes: Tensor) -> Tensor:
        """Return predicted boxes (n, 4) in the pixels of the image file, and within the image."""
        source: Any = self.predict_source
        height, width = source.sizes[index].tolist()
        vertical, horizontal = source.scale(index)
        scaled = boxes / boxes.new_tensor([horizontal, vertical, horizontal, vertical])
        return scaled.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))

    def category_of(self, label: int) -> Any:
        """Return the number of a label's class in COCO json, or the label for other annotation files."""
        return self.category_ids.get(self.class_names[label], label)

    def number_of(self, index: int) -> int:
        """Return the number of an image of the predict dataset in its annotation file, or else its index."""
        source: Any = self.predict_source
        number: int = source.number(index)
        return number

    def _read(self, rules: BoxRules) -> None:
        self.left_out = Counter()
        read: dict[str, list[ReadImage]] = {}
        names: list[str] = []
        for part in sorted(self.folders, key=lambda part: part != "train"):
            if part == "predict":
                paths = self._images(self.folders[part])
                read[part] = [ReadImage(path, size_of(path)) for path in paths]
                continue
            of_part, read[part] = self._read_part(self.folders[part], rules.box_format)
            names = names or of_part
            if not read[part]:
                raise ConfigurationError(f"no images in {self.folders[part].resolve()}: {FILES_END_IN}")
        self.class_names = [BACKGROUND] * self.first_label + names
        self.num_classes = len(self.class_names)
        self.parts: dict[str, tuple[list[ReadImage], list[Tensor]]] = {}
        for part, images in read.items():
            rows = [targets_of(image, names, self.first_label, rules, self.left_out) for image in images]
            if part == "train" and not sum(map(len, rows)):
                raise ConfigurationError(f"{self.folders[part]} has no boxes: add boxes to the {self.kind} files")
            for image in images:
                image.boxes = []  # Millions of objects would need much memory in each process.
            self.parts[part] = images, rows
        first = self.parts["train"][0][0].size
        self.image_shape = (3, *first) if self.image_size is None else (3, self.image_size, self.image_size)

    def _read_part(self, folder: Path, box_format: BoxFormat | None) -> tuple[list[str], list[ReadImage]]:
        if self.kind == COCO:
            file = self._json_of(folder)
            images = folder / "images" if (folder / "images").is_dir() else folder
            categories, listed = read_coco(file, images, box_format)
            self.category_ids = self.category_ids or {name: number for number, name in categories.items()}
            paths = {os.path.normpath(image.path) for image in listed}
            others = image_files(images, images, Counter())
            unlisted = [name for name in others if os.path.normpath(images / name) not in paths]
            self.left_out[f"images that are not listed in {file.name}"] += len(unlisted)
            return [*categories.values()], listed
        files, labels = self._images(folder), self._labels(folder)
        if self.kind == YOLO:
            names = yolo_names(self.root)
            missing = sum(not labels[path].exists() for path in files)
            self.left_out["label files that do not exist, so that their images have no boxes"] += missing
            return names, [read_yolo(labels[path], path, size_of(path), names, box_format) for path in files]
        read = [read_voc(labels[path], path, box_format) for path in files]
        return sorted({box.name for image in read for box in image.boxes}), read

    def _images(self, folder: Path) -> list[Path]:
        images = folder / "images" if (folder / "images").is_dir() else folder
        others: Counter[str] = Counter()
        paths = [images / name for name in image_files(images, images, others)]
        self.left_out.update({reason: count for reason, count in others.items() if reason == "hidden"})
        return paths

    def _labels(self, folder: Path) -> "_LabelFiles":
        beside = self.root / FOLDERS[self.kind][0] / folder.name if self.apart else folder
        candidates = [folder / name for name in FOLDERS[self.kind]]
        directory = next((candidate for candidate in candidates if candidate.is_dir()), beside)
        images = folder / "images" if (folder / "images").is_dir() else folder
        return _LabelFiles(images, directory, SUFFIXES[self.kind], is_required=self.kind == VOC)

    def _kind_of(self, folder: Path) -> str:
        """Return the kind of the annotation files of a split's folder."""
        if self._jsons(folder):
            return COCO
        for kind, suffix in SUFFIXES.items():
            places = [folder, *(folder / name for name in FOLDERS[kind])]
            if self.apart:
                places.append(self.root / FOLDERS[kind][0] / folder.name)
            if any(next(place.rglob(f"*{suffix}"), None) for place in places if place.is_dir()):
                return kind
        raise ConfigurationError(
            f"no annotation files for {folder.resolve()}: put one COCO .json file there, a Pascal VOC .xml file for "
            "each image, or a YOLO .txt file for each image"
        )

    def _jsons(self, folder: Path) -> list[Path]:
        beside = (self.root / "annotations").glob(f"*{folder.name}*.json")
        files = sorted(folder.glob("*.json")) or sorted(beside)
        instances = [path for path in files if path.name.startswith("instances")]
        return instances or files

    def _json_of(self, folder: Path) -> Path:
        files = self._jsons(folder)
        if len(files) == 1:
            return files[0]
        if not files:
            raise ConfigurationError(
                f"no COCO json file in {folder}: put one there, or instances_{folder.name}.json into "
                f"{self.root / 'annotations'}"
            )
        raise ConfigurationError(
            f"{folder} could belong to {files[0]} or {files[1]}: leave one json file with boxes, or name it "
            f"instances_{folder.name}.json"
        )


class _LabelFiles:
    """Label file of each image, with the image's name and another suffix."""

    def __init__(self, images: Path, directory: Path, suffix: str, is_required: bool) -> None:
        self._images, self._directory, self._suffix, self._is_required = images, directory, suffix, is_required
        self._owners: dict[Path, Path] = {}

    def __getitem__(self, image: Path) -> Path:
        """Return the path of an image's label file.

        Raises:
            ConfigurationError: Two images would have the same file, or a required file does not exist.
        """
        path = (self._directory / image.relative_to(self._images)).with_suffix(self._suffix)
        if (other := self._owners.setdefault(path, image)) != image:
            raise ConfigurationError(f"{other} and {image} would have the same boxes, {path}: rename one of the images")
        if self._is_required and not path.is_file():
            raise ConfigurationError(
                f"{image} has no boxes: write {path}, which needs only <size> for an image without objects, or remove "
                "the image"
            )
        return path


def size_of(path: Path) -> tuple[int, int]:
    """Return the height and width of an image, in pixels, after its rotation according to the EXIF orientation.

    Raises:
        ConfigurationError: The file is damaged.
    """
    try:
        with Image.open(path) as image:
            is_turned = image.getexif().get(0x0112, 1) > 4  # EXIF orientations above 4 swap rows and columns.
            return (image.width, image.height) if is_turned else (image.height, image.width)
    except Exception as error:  # For damaged files, Pillow raises errors of many classes.
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"broken image {path} ({reason}): repair or remove it") from None
