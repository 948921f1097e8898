"""Read profiles from CSV files that have a row for each node of the network's graph.

The format follows the published profiles of PipeDream.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value

COLUMNS = ("node", "operation", "forward_ms", "backward_ms", "activation_bytes", "parameter_bytes", "inputs")
INPUT = "Input"


@dataclass(frozen=True)
class _Row:
    line: int
    name: str
    operation: str
    numbers: Mapping[str, float]
    inputs: tuple[str, ...]

    @property
    def is_input(self) -> bool:
        return self.operation.startswith(INPUT)

    @property
    def normalises(self) -> bool:
        return bool(re.search(r"batch_?norm", self.operation, re.IGNORECASE))

    @property
    def output(self) -> int:
        return int(self.numbers["activation_bytes"])


def read_profile(file: Path, batch: int) -> Profile:
    """Read a profile from a CSV file, and return it.

    A row must come after the rows of its inputs. Rows with the operation ``Input`` are the network's inputs. Times are
    assumed to be proportional to the number of samples, and every output is assumed to be kept until the backward. A
    cut is possible before each node that does not change its input in place.

    Args:
        file: File with the columns `COLUMNS`.
        batch: Number of samples with which the profile was measured.

    Raises:
        ConfigurationError: The file cannot be read, or it contains a row that is not accepted.
    """
    rows = _read(file)
    nodes = [row for row in rows if not row.is_input]
    index = {row.name: position for position, row in enumerate(nodes)}
    consumers: dict[str, list[int]] = {row.name: [] for row in rows}
    for position, row in enumerate(nodes):
        for name in row.inputs:
            consumers[name].append(position)
    values = []
    for row in rows:
        # Node 0 is always in the first stage, which has the input images, so the images are not sent to node 0.
        users = tuple(position for position in consumers[row.name] if position > 0)
        if users:
            values.append(Value(index.get(row.name, 0), users, row.output, 0 if row.is_input else row.output))
    costs = GraphCosts(
        nodes=tuple(
            NodeCost(
                name=row.name,
                forward=row.numbers["forward_ms"] / 1e3,
                backward=row.numbers["backward_ms"] / 1e3,
                parameter_bytes=int(row.numbers["parameter_bytes"]),
                saved_bytes=row.output,
                # A layer has a weight and a bias of 4 bytes for each channel, and a mean and a variance of 8 bytes.
                statistics_bytes=2 * int(row.numbers["parameter_bytes"]) if row.normalises else 0,
            )
            for row in nodes
        ),
        values=tuple(values),
        cut_positions=tuple(
            position for position, row in enumerate(nodes) if position and "inplace" not in row.operation
        ),
        microbatch_size=batch,
        input_bytes=sum(row.output for row in rows if row.is_input),
    )
    return Profile(costs, batch_norm=any(row.normalises for row in nodes), nodes_have_names=False)


def _read(file: Path) -> list[_Row]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        _refuse(file, 1, f"missing columns: {', '.join(missing)}; a profile has the columns {','.join(COLUMNS)}")
    rows: dict[str, _Row] = {}
    for fields in reader:
        line = reader.line_num
        if None in (*fields, *fields.values()):
            _refuse(
                file,
                line,
                "the number of values differs from the number of columns; put values that contain commas in quotes",
            )
        numbers = {name: _number(file, line, name, fields[name]) for name in COLUMNS[2:6]}
        row = _Row(line, fields["node"], fields["operation"], numbers, tuple(fields["inputs"].split()))
        if not row.name:
            _refuse(file, line, "node: the name is empty; every node needs a name")
        if row.name in rows:
            _refuse(file, line, f"node {row.name!r} is also in line {rows[row.name].line}; give each node one row")
        for name in row.inputs:
            if name not in rows:
                _refuse(
                    file,
                    line,
                    f"inputs: no earlier row has the node {name!r}; give names of earlier rows, separated by spaces",
                )
        rows[row.name] = row
    if all(row.is_input for row in rows.values()):
        _refuse(file, 1, "the file has no row for a node of the network; write a row for each node")
    return list(rows.values())


def _number(file: Path, line: int, name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        _refuse(file, line, f"{name}: {text!r} is not accepted; it must be a number of at least 0")
    return number


def _refuse(file: Path, line: int, reason: str) -> NoReturn:
    raise ConfigurationError(f"{file}, line {line}: {reason}")
