"""Reading of a CSV file with a header. Every mistake in the file is an error with the file, the line and the remedy."""

import codecs
import csv
import io
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.data.folders import EXTENSIONS
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
