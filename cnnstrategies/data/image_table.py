"""Data module for images that a CSV file lists with their class, labels or numbers."""

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from cnnstrategies.data.folders import PARTS
from cnnstrategies.data.image_folder import Files, ImageFolderDataModule
from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

SPLIT = "split"


class ImageTableDataModule(ImageFolderDataModule):
    """Data module for image files and a CSV file with the target of each image.

    The first column is an image's path from ``root``. A column ``split`` names the image's part, by the names that
    :class:`~cnnstrategies.data.ImageFolderDataModule` accepts; without this column all images are training images. If
    no image is for validation, ``val_split`` of the training images are held out. The other columns are the targets:
    for ``classes`` one column with the class's name; for ``multilabel`` one column with 0 or 1 for each label; for
    ``regression`` columns of numbers.

    Args:
        root: Directory of the images.
        labels: Path of the CSV file from ``root``.
        task: Task as in :class:`~cnnstrategies.ImageClassifier`.
        columns: Columns of the targets; by default all columns except the first and ``split``.
        **options: Arguments of :class:`~cnnstrategies.data.ImageFolderDataModule`.

    Raises:
        ConfigurationError: The file, a column or an image does not exist, or a value does not fit the task.
    """

    def __init__(
        self,
        root: Path,
        labels: Path = Path("labels.csv"),
        task: TaskName = "classes",
        columns: list[str] | None = None,
        **options: Any,
    ) -> None:
        self.labels = Path(root) / labels
        self.task = task
        self.columns = columns
        super().__init__(root, **options)

    @override
    def find(self) -> None:
        rows = self._rows()
        names = list(rows[0]) if rows else []
        targets = self.columns or [name for name in names[1:] if name.lower() != SPLIT]
        if missing := [name for name in targets if name not in names]:
            raise ConfigurationError(f"{self.labels} has no column {missing[0]!r}: it has {', '.join(names)}")
        if not targets or (self.task == "classes" and len(targets) > 1):
            raise ConfigurationError(
                f"{self.labels} has the targets' columns {', '.join(targets) or 'none'}: task={self.task} needs "
                f"{'one' if self.task == 'classes' else 'at least one'}; name them in data.init_args.columns"
            )
        parts = [self._part(row) for row in rows]
        values = [[row[name] for name in targets] for row in rows]
        self.class_names = targets
        if self.task == "classes":
            training = {value for (value,), part in zip(values, parts, strict=True) if part == "train"}
            self.class_names = sorted(training)
        classes = {name: number for number, name in enumerate(self.class_names)}
        self.table: dict[str, Files] = {}
        for row, value, part in zip(rows, values, parts, strict=True):
            files, numbers = self.table.setdefault(part, ([], []))
            files.append(row[names[0]])
            numbers.append(0 if part == "predict" else self._target(row[names[0]], value, classes))
        if "train" not in self.table:
            raise ConfigurationError(f"{self.labels} has no images for training: set {SPLIT} to train for some images")
        first = self.root / self.table["train"][0][0]
        if not first.is_file():
            raise ConfigurationError(
                f"{self.labels} names {first}, which does not exist: write paths from data.init_args.root"
            )
        self.training_root = self.labels
        self.folders = dict.fromkeys(self.table, self.labels)

    @override
    def parts(self) -> dict[str, Files]:
        self.left_out = Counter()
        return {part: (list(names), list(targets)) for part, (names, targets) in self.table.items()}

    def _rows(self) -> list[dict[str, str]]:
        try:
            with self.labels.open(newline="", encoding="utf-8-sig") as file:
                return list(csv.DictReader(file))
        except OSError as error:
            raise ConfigurationError(
                f"{self.labels} cannot be read ({error.strerror}): set data.init_args.labels"
            ) from None

    def _part(self, row: dict[str, str]) -> str:
        part_name = next((value for name, value in row.items() if name.lower() == SPLIT), "train")
        for part, names in PARTS.items():
            if part_name.lower() in names:
                return part
        raise ConfigurationError(f"{self.labels} has the {SPLIT} {part_name!r}: use {', '.join(PARTS)}")

    def _target(self, image: str, values: list[str], classes: Mapping[str, int]) -> Any:
        if self.task == "classes":
            if values[0] not in classes:
                raise ConfigurationError(
                    f"{self.labels} gives {image} the class {values[0]!r}, which no training image has: rename it"
                )
            return classes[values[0]]
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or (self.task == "multilabel" and not {*numbers} <= {0.0, 1.0}):
            needed = "0 or 1 for each label" if self.task == "multilabel" else "a number for each target"
            raise ConfigurationError(f"{self.labels} gives {image} {', '.join(map(str, values))}: {needed} is needed")
        return numbers
