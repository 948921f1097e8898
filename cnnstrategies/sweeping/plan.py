"""What a sweep searches for: the file that ``cnnstrategies sweep`` takes."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.metric_names import less_is_better
from cnnstrategies.planning.yaml_lines import Value, count, one_of

Direction = Literal["minimize", "maximize"]
DIRECTIONS: tuple[Direction, Direction] = ("minimize", "maximize")
PRUNERS = ("median", "halving", "hyperband", "none")
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, which belong to it.

    Attributes:
        low: The least.
        high: The greatest.
        step: What lies between two neighbours; None for all numbers between.
        log: Whether factors count, and not differences.
    """

    low: int | float
    high: int | float
    step: int | float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether its numbers are whole ones."""
        return all(isinstance(one, int) for one in (self.low, self.high, self.step or 1))

    @property
    def first(self) -> Scalar:
        """One of its values."""
        return self.low


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Scalar, ...]

    @property
    def first(self) -> Scalar:
        """One of its values."""
        return self.values[0]


@dataclass(frozen=True)
class Plan:
    """A sweep.

    Attributes:
        parameters: Where the values lie, by key of the configuration.
        metric: What is compared, as the module logs it.
        direction: Whether the least or the greatest is best.
        trials: How many there are, with those that are pruned or fail.
        pruner: How bad trials are told; one of ``PRUNERS``.
        warmup: Validations before which no trial is pruned.
    """

    parameters: dict[str, Range | Choice]
    metric: str
    direction: Direction
    trials: int
    pruner: str = "median"
    warmup: int = 0

    @property
    def most(self) -> bool:
        """Whether the greatest value is best."""
        return self.direction == "maximize"


def read(file: Path) -> Plan:
    """Read the file.

    Raises:
        ConfigurationError: It cannot be read, or says what is not possible.
    """
    whole = Value.load(file)
    known = {
        "parameters": _parameters,
        "metric": lambda value: value.text,
        "direction": one_of(*DIRECTIONS),
        "trials": count,
        "pruner": one_of(*PRUNERS),
        "warmup": count,
    }
    found = whole.mapping(known)
    if missing := [name for name in ("parameters", "metric", "trials") if name not in found]:
        raise ConfigurationError(f"{file}: {' and '.join(missing)} must be given")
    found.setdefault("direction", DIRECTIONS[0] if less_is_better(found["metric"]) else DIRECTIONS[1])
    return Plan(**found)


def _parameters(value: Value) -> dict[str, Range | Choice]:
    found: dict[str, Range | Choice] = {}
    for key, space in value.pairs():
        if key.text in found:
            key.refuse(f"{key.text!r} is given twice: leave one of them out")
        found[key.text] = _range(space) if isinstance(space.node, yaml.MappingNode) else _choice(space)
    if not found:
        value.refuse("there is no parameter: name a key of the configuration and where its values lie")
    return found


def _choice(value: Value) -> Choice:
    return Choice(tuple(_scalar(one) for one in value.items()))


def _range(value: Value) -> Range:
    found = value.mapping({"low": _number, "high": _number, "step": _number, "log": lambda one: _scalar(one) is True})
    if missing := [name for name in ("low", "high") if name not in found]:
        value.refuse(f"a range needs {' and '.join(missing)}, as in {{low: 0.001, high: 1.0, log: true}}")
    result = Range(**found)
    if not result.low < result.high:
        value.refuse(f"low: {result.low} is not below high: {result.high}")
    if result.log and result.low <= 0:
        value.refuse(f"low: {result.low} with log: true: it must be above 0")
    if result.log and result.step is not None:
        value.refuse("step with log: true: leave one of them out")
    if result.step is not None and result.step <= 0:
        value.refuse(f"step: {result.step} is not possible; it must be above 0")
    return result


def _number(value: Value) -> int | float:
    number = _scalar(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        value.refuse(f"{value.text!r} is not accepted; it must be a number")
    return number


def _scalar(value: Value) -> Scalar:
    """A single value, with the numbers that YAML's rules miss, such as 1e-4."""
    text = value.text
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        return float(text)
    assert isinstance(value.node, yaml.ScalarNode)
    read: Any = text if value.node.style in ("'", '"') else yaml.safe_load(text)
    return read if read is None or isinstance(read, bool | int | float) else text
