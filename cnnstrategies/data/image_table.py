"""Data module for images whose targets are in a CSV file: the class, the labels or the numbers of each image.

Every mistake in the file is an error with the file, the line and the remedy.
"""

import codecs
import csv
import io
import math
import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from cnnstrategies.data.folders import EXTENSIONS, PARTS
from cnnstrategies.data.image_folder import Files, ImageFolderDataModule
from cnnstrategies.data.module import TaskName
from cnnstrategies.errors import ConfigurationError

DELIMITERS = (",", ";", "\t")  # The header is divided by the first of these that it contains.
BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Row:
    """A row of a CSV file.

    Attributes:
        line: Number of the row's last line in the file. The first line of the file has the number 1.
        path: Value of the first column, exactly as it stands in the file.
        cells: Values of all columns, without surrounding spaces and in Unicode's composed form (NFC). Keys are the
            names of the columns.
    """

    line: int
    path: str
    cells: Mapping[str, str]


def read_rows(file: Path) -> tuple[list[str], list[Row]]:
    """Read a CSV file whose first line has the names of the columns.

    The encoding is UTF-8, or UTF-16 with a byte order mark, which Excel writes. The values are separated by commas,
    semicolons or tabs. Empty lines are skipped. An unnamed last column without values is ignored, because some programs
    write a separator at the end of each line.

    Returns:
        The names of the columns, and the rows.

    Raises:
        ConfigurationError: The file cannot be read or decoded, the header is missing or has a name twice, or a row has
            too few or too many values.
    """
    text = _decoded(file)
    header = text.partition("\n")[0]
    delimiter = next((mark for mark in DELIMITERS if mark in header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        table = [(reader.line_num, values) for values in reader if any(value.strip() for value in values)]
    except csv.Error as error:
        raise ConfigurationError(f"{file}, line {reader.line_num}: {error}; correct the line") from None
    if not table:
        raise ConfigurationError(f"{file} is empty: write a line with the names of the columns, and a line per image")
    names = [normal(name) for name in table[0][1]]
    while len(names) > 1 and not names[-1]:
        names.pop()
    _check_header(file, names)
    return names, [_row(file, line, names, values) for line, values in table[1:]]


def normal(text: str) -> str:
    """Remove surrounding spaces, and compose letters with accents (NFC), so that names that look alike are equal."""
    return unicodedata.normalize("NFC", text.strip())


def _decoded(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error.strerror}): set data.init_args.labels to a readable CSV file"
        ) from None
    try:
        return content.decode("utf-16" if content.startswith(BYTE_ORDER_MARKS) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{file}, line {line}: the text is not {error.encoding.upper()} ({error.reason}, 0x"
            f"{content[error.start]:02x}); save the file with the encoding UTF-8 (in Excel CSV UTF-8)"
        ) from None


def _check_header(file: Path, names: list[str]) -> None:
    if names[0].lower().endswith(EXTENSIONS):
        raise ConfigurationError(
            f"{file}, line 1: {', '.join(names)} is an image and not the names of the columns; add a first line "
            "such as image,label"
        )
    for name, count in Counter(names).items():
        if not name:
            raise ConfigurationError(f"{file}, line 1: a column has no name; write the name of each column")
        if count > 1:
            raise ConfigurationError(f"{file}, line 1: {count} columns have the name {name!r}; give them other names")


def _row(file: Path, line: int, names: list[str], values: list[str]) -> Row:
    if len(values) < len(names) or any(value.strip() for value in values[len(names) :]):
        remedy = "write a value for each column"
        if len(values) > len(names):
            remedy = "a value with a comma needs quotes, and a number a decimal point"
        raise ConfigurationError(
            f"{file}, line {line}: {len(values)} value{'s' * (len(values) > 1)} ({', '.join(values)}), but "
            f"{len(names)} columns ({', '.join(names)}); {remedy}"
        )
    return Row(line, values[0], dict(zip(names, map(normal, values), strict=False)))


SPLIT = "split"
NO_CLASS = ("", "nan")  # Texts that spreadsheets and pandas write for a missing value, in lower case.


class ImageTableDataModule(ImageFolderDataModule):
    """Data module for image files and a CSV file with the target of each image.

    The first column has the path of an image, relative to ``root``. The column ``split`` has the image's split: train,
    val, test or predict, or another folder name that :class:`~cnnstrategies.data.ImageFolderDataModule` accepts. If
    there is no such column, all images are training images. If no image is for validation, the fraction ``val_split``
    of the training images is held out. The other columns are the targets: for ``classes`` one column with the name of
    the class, for ``multilabel`` a column with 0 or 1 for each label, for ``regression`` one or more columns of
    numbers. The file has the encoding UTF-8, or UTF-16 with a byte order mark; commas, semicolons or tabs separate its
    values. Spaces around a value are ignored.

    Args:
        root: Directory of the images.
        labels: Path of the CSV file, relative to ``root``.
        task: Learning task, as in :class:`~cnnstrategies.ImageClassifier`.
        columns: Names of the columns with the targets; by default all columns except the first and ``split``.
        **options: Arguments of :class:`~cnnstrategies.data.ImageFolderDataModule`.

    Raises:
        ConfigurationError: The CSV file, a column or an image does not exist, the file has no header, or a row has too
            few or too many values or a value that does not fit the task. The error names the line.
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
        names, rows = read_rows(self.labels)
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
        self.class_names = targets
        if self.task == "classes":
            training = {row.cells[targets[0]] for row, part in zip(rows, parts, strict=True) if part == "train"}
            self.class_names = sorted(training)
        classes = {name: number for number, name in enumerate(self.class_names)}
        self.table: dict[str, Files] = {}
        for row, part in zip(rows, parts, strict=True):
            files, numbers = self.table.setdefault(part, ([], []))
            files.append(self._path(row))
            numbers.append(0 if part == "predict" else self._target(row, targets, classes))
        if "train" not in self.table:
            raise ConfigurationError(
                f"{self.labels} has no training images: set the column {SPLIT} to train for some images"
            )
        first = self.root / self.table["train"][0][0]
        if not first.is_file():
            slashes = ", and write / in place of \\" if "\\" in str(first) else ""
            raise ConfigurationError(
                f"{self.labels} lists {first}, which does not exist: make the paths relative to data.init_args.root"
                f"{slashes}"
            )
        self._check_images(rows, targets)
        self.training_root = self.labels
        self.folders = dict.fromkeys(self.table, self.labels)

    def _check_images(self, rows: Sequence[Row], targets: Sequence[str]) -> None:
        """Refuse images that do not exist, and images in two rows with different targets or splits."""
        names: dict[str, set[str]] = {}  # By folder. To list a folder is faster than to ask for each of its files.
        earlier: dict[str, Row] = {}
        for row in rows:
            path = str(self.root / self._path(row))
            folder, name = os.path.split(path)
            if folder not in names:
                names[folder] = set(os.listdir(folder or ".")) if os.path.isdir(folder or ".") else set()
            if name not in names[folder]:
                raise ConfigurationError(
                    f"{self.labels}, line {row.line}: {path} does not exist: correct the path, or remove the line"
                )
            other = earlier.setdefault(os.path.normpath(path), row)
            for column, value in row.cells.items():
                if value != other.cells[column] and (column in targets or column.lower() == SPLIT):
                    raise ConfigurationError(
                        f"{self.labels}, line {row.line}: {row.path} has {column}={value}, but line {other.line} has "
                        f"{column}={other.cells[column]} for the same image: remove one of the lines"
                    )

    @override
    def parts(self) -> dict[str, Files]:
        self.left_out = Counter()
        return {part: (list(names), list(targets)) for part, (names, targets) in self.table.items()}

    def _part(self, row: Row) -> str:
        part_name = next((value for name, value in row.cells.items() if name.lower() == SPLIT), "train")
        for part, names in PARTS.items():
            if part_name.lower() in names:
                return part
        raise ConfigurationError(
            f"{self.labels}, line {row.line}: {part_name!r} in the column {SPLIT}; use {', '.join(PARTS)}"
        )

    def _path(self, row: Row) -> str:
        """Return the path of a row's image, without surrounding spaces unless the file's name has them."""
        trimmed = row.path.strip()
        return trimmed if trimmed == row.path or not (self.root / row.path).is_file() else row.path

    def _target(self, row: Row, columns: list[str], classes: Mapping[str, int]) -> Any:
        place = f"{self.labels}, line {row.line}"
        if self.task == "classes":
            name = row.cells[columns[0]]
            if name.lower() in NO_CLASS:
                raise ConfigurationError(
                    f"{place}: {row.path} has no class ({name!r}); write its class, or remove the line"
                )
            if name not in classes:
                raise ConfigurationError(
                    f"{place}: {row.path} has the class {name!r}, but no training image has this class; rename the "
                    "class, or add training images"
                )
            return classes[name]
        values = [row.cells[column] for column in columns]
        try:
            numbers = [float(value) for value in values]
        except ValueError:
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)) or (self.task == "multilabel" and not {*numbers} <= {0.0, 1.0}):
            needed = (
                "0 or 1 for each label" if self.task == "multilabel" else "a number such as 1.5 in each target column"
            )
            raise ConfigurationError(f"{place}: {row.path} has the targets {'; '.join(values)}; write {needed}")
        return numbers
