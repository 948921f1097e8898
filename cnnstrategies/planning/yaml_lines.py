"""Read a YAML file with the line of every value, so that a mistake can be shown where it is."""

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from cnnstrategies.errors import ConfigurationError

SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

Read = Callable[["Value"], Any]


class Value:
    """A value of a YAML file that knows its line."""

    def __init__(self, file: Path, node: yaml.Node, path: str = "") -> None:
        self.file = file
        self.node = node
        self.path = path

    @staticmethod
    def load(file: Path) -> "Value":
        """The whole file.

        Raises:
            ConfigurationError: It cannot be read, or is no YAML.
        """
        try:
            node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        except (OSError, UnicodeError) as error:
            raise ConfigurationError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigurationError(f"{file}, line {line}: this is not YAML: {error.problem}") from error
        if node is None:
            raise ConfigurationError(f"{file}: the file is empty")
        return Value(file, node)

    def refuse(self, why: str) -> NoReturn:
        """Say what is wrong with it."""
        where = f"{self.path}: " if self.path else ""
        raise ConfigurationError(f"{self.file}, line {self.node.start_mark.line + 1}: {where}{why}")

    @property
    def text(self) -> str:
        """Of a single value."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.refuse("one value is accepted here, no list and no mapping")
        return str(self.node.value)

    def items(self) -> list["Value"]:
        """Of a list with at least one item."""
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            self.refuse("a list is accepted here, with at least one item")
        return [Value(self.file, node, f"{self.path}[{index}]") for index, node in enumerate(self.node.value)]

    def pairs(self) -> list[tuple["Value", "Value"]]:
        """Keys and values of a mapping."""
        if not isinstance(self.node, yaml.MappingNode):
            self.refuse("a mapping is accepted here, key: value")
        prefix = f"{self.path}." if self.path else ""
        return [
            (Value(self.file, key, self.path), Value(self.file, value, f"{prefix}{key.value}"))
            for key, value in self.node.value
        ]

    def mapping(self, known: Mapping[str, Read]) -> dict[str, Any]:
        """A mapping whose keys are known, each read by its own function."""
        found: dict[str, Any] = {}
        for key, value in self.pairs():
            name = key.text
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ";"
                key.refuse(f"unknown key {name!r}{hint} accepted: {', '.join(known)}")
            if name in found:
                key.refuse(f"{name!r} is given twice: leave one of them out")
            found[name] = known[name](value)
        return found


def number(least: float, above: bool = False, most: float = float("inf")) -> Read:
    """Reads a number of at least ``least``, or above it."""

    def read(value: Value) -> float:
        expected = f"a number {'above' if above else 'of at least'} {least:g}"
        expected += f" and at most {most:g}" if most < float("inf") else ""
        try:
            result = float(value.text)
        except ValueError:
            value.refuse(f"{value.text!r} is not accepted; it must be {expected}")
        if not (least < result <= most if above else least <= result <= most) or result == float("inf"):
            value.refuse(f"{value.text} is not possible; it must be {expected}")
        return result

    return read


def count(value: Value) -> int:
    """Reads a whole number of at least 1."""
    if not re.fullmatch(r"\d+", value.text) or int(value.text) < 1:
        value.refuse(f"{value.text!r} is not accepted; it must be a whole number of at least 1")
    return int(value.text)


def size(value: Value) -> int:
    """Reads bytes."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([A-Za-z]*)", value.text)
    try:
        result = float(match[1]) * (SIZES[match[2]] if match[2] else 1) if match else 0.0
    except (KeyError, ValueError):
        result = 0.0
    if result <= 0:
        expected = "a size above 0 such as 16GiB, 500MB or a number of bytes"
        value.refuse(f"{value.text!r} is not accepted; it must be {expected}")
    return int(result)


def one_of(*accepted: str) -> Read:
    """Reads one of some words."""

    def read(value: Value) -> str:
        if value.text not in accepted:
            value.refuse(f"{value.text!r} is not accepted; it must be {' or '.join(accepted)}")
        return value.text

    return read
