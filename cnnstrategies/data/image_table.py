"""Data module for images whose targets are in a CSV file: the class, the labels or the numbers of each image."""

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

    The first column has the path of an image, relative to ``root``. The column ``split`` has the image's split: train,
    val, test or predict, or another folder name that :class:`~cnnstrategies.data.ImageFolderDataModule` accepts. If
    there is no such column, all images are training images. If no image is for validation, the fraction ``val_split``
    of the training images is held out. The other columns are the targets: for ``classes`` one column with the name of
    the class, for ``multilabel`` a column with 0 or 1 for each label, for ``regression`` one or more columns of
    numbers.

    Args:
        root: Directory of the images.
        labels: Path of the CSV file, relative to ``root``.
        task: Learning task, as in :class:`~cnnstrategies.ImageClassifier`.
        columns: Names of the columns with the targets; by default all columns except the first and ``split``.
        **options: Arguments of :class:`~cnnstrategies.data.ImageFolderDataModule`.

    Raises:
        ConfigurationError: The CSV file, a column or an image does not exist, or a value does not fit the task.
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
            raise ConfigurationError(
                f"{self.labels} has no column {missing[0]!r}, but only {', '.join(names)}: correct "
                "data.init_args.columns"
            )
        if not targets or (self.task == "classes" and len(targets) > 1):
            raise ConfigurationError(
                f"{self.labels} has the target columns {', '.join(targets) or 'none'}, but task={self.task} needs "
                f"{'one' if self.task == 'classes' else 'at least one'}: set data.init_args.columns"
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
            raise ConfigurationError(
                f"{self.labels} has no training images: set the column {SPLIT} to train for some images"
            )
        first = self.root / self.table["train"][0][0]
        if not first.is_file():
            raise ConfigurationError(
                f"{self.labels} lists {first}, which does not exist: make the paths relative to data.init_args.root"
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
                f"{self.labels} cannot be read ({error.strerror}): set data.init_args.labels to a readable CSV file"
            ) from None

    def _part(self, row: dict[str, str]) -> str:
        part_name = next((value for name, value in row.items() if name.lower() == SPLIT), "train")
        for part, names in PARTS.items():
            if part_name.lower() in names:
                return part
        raise ConfigurationError(
            f"{self.labels} has the value {part_name!r} in the column {SPLIT}: use {', '.join(PARTS)}"
        )

    def _target(self, image: str, values: list[str], classes: Mapping[str, int]) -> Any:
        if self.task == "classes":
            if values[0] not in classes:
                raise ConfigurationError(
                    f"{self.labels} has the class {values[0]!r} for {image}, but no training image has this class: "
                    "rename the class, or add training images"
                )
            return classes[values[0]]
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or (self.task == "multilabel" and not {*numbers} <= {0.0, 1.0}):
            needed = "0 or 1 for each label" if self.task == "multilabel" else "a number in each target column"
            raise ConfigurationError(
                f"{self.labels} has the targets {', '.join(map(str, values))} for {image}: write {needed}"
            )
        return numbers
