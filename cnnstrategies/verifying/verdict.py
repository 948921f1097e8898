"""Comparison of the results of two runs: checkpoints and logged values."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.verifying.batches import Precision

# Kinds of values in which NaN shows that the training has failed. Logged values and buffers may be NaN by design.
DEFINED = ("weights", "optimizer")
# Parts of a tensor's largest absolute value that count as errors of rounding. Keys are the precisions of the runs.
RELATIVE: dict[Precision, float] = {"64-true": 1e-7, "32-true": 1e-5, "bf16-mixed": 1e-3, "16-mixed": 1e-3}
# Differences between two elements that count as errors of rounding.
ABSOLUTE: dict[Precision, float] = {"64-true": 1e-11, "32-true": 1e-6, "bf16-mixed": 1e-6, "16-mixed": 1e-6}
FACTOR = 10.0  # Multiple of the differences between runs with errors of rounding up to which errors are explained.


@dataclass(frozen=True)
class Tolerance:
    """Differences that count as errors of rounding.

    Attributes:
        relative: Part of a tensor's largest absolute value.
        absolute: Difference between two elements.
        explained: Differences that errors of rounding have made on one device. Keys are the paths of the values.
    """

    relative: float
    absolute: float
    explained: Mapping[str, float] = field(default_factory=dict)

    def allowed(self, name: str, largest: float) -> float:
        """Return the largest difference of a value that counts as an error of rounding.

        Args:
            name: Path of the value.
            largest: Largest absolute value of its elements.
        """
        return max(self.relative * largest + self.absolute, FACTOR * self.explained.get(name, 0.0))


def tolerance_of(precision: Precision, reference: Any, noisy: Sequence[Any] = ()) -> Tolerance:
    """Return the tolerance for a comparison.

    Args:
        precision: Precision in which the runs have trained.
        reference: Nested structure of the values of the run on one device.
        noisy: The same values of runs on one device with errors of rounding.
    """
    tolerance = Tolerance(RELATIVE[precision], ABSOLUTE[precision])
    explained: dict[str, float] = {}
    for values in noisy:
        for difference in differences(reference, values, tolerance):
            if not math.isinf(difference.size):
                explained[difference.name] = max(difference.size, explained.get(difference.name, 0.0))
    return replace(tolerance, explained=explained)


@dataclass(frozen=True)
class Difference:
    """Difference between the two runs in one tensor or number.

    Attributes:
        name: Path of the tensor or number in the checkpoint.
        size: Largest absolute difference between elements. It is infinite if only one of the runs has this tensor, or
            if the shapes differ.
        allowed: Largest difference that counts as a rounding error.
        is_undefined: Whether elements are NaN in both runs.
    """

    name: str
    size: float
    allowed: float
    is_undefined: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether the values are equal up to rounding errors."""
        return self.size <= self.allowed


@dataclass(frozen=True)
class ComparedRow:
    """Row of a verdict for one kind of value, such as the weights.

    Attributes:
        name: Name of the kind of value.
        text: Result of the comparison as a text for the user.
        equal: Whether the two runs agree.
    """

    name: str
    text: str
    equal: bool = True


@dataclass(frozen=True)
class Verdict:
    """Result of ``verify``: whether a strategy trains the same model as one device.

    Attributes:
        rows: A row for each kind of value that was compared.
        notes: Lines of text for the user: layers that were turned off for the comparison, and possible causes of a
            difference.
    """

    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the two runs agree in all rows."""
        return all(row.equal for row in self.rows)

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = ["equal to one device" if self.equal else "NOT equal to one device"]
        lines += [f"  {row.name:{wide}}  {row.text}" for row in self.rows]
        return "\n".join([*lines, *(f"  - {note}" for note in self.notes)])


def compared(
    reference: Path, tested: Path, noisy: Sequence[Path], parameters: Sequence[str], precision: Precision
) -> list[ComparedRow]:
    """Compare the weights, buffers, optimizers' states and schedules of two checkpoints.

    Args:
        reference: Checkpoint of the run on one device.
        tested: Checkpoint of the run under the strategy.
        noisy: Checkpoints of runs on one device with errors of rounding.
        parameters: Names of the parameters; all other tensors of the module are buffers.
        precision: Precision in which the runs have trained.

    Returns:
        A row for each kind of value that the checkpoints contain.
    """
    kinds = [_kinds(file, set(parameters)) for file in (reference, tested, *noisy)]
    rows = []
    for kind in kinds[0]:
        first, second, *others = (values[kind] for values in kinds)
        if first or second:
            tolerance = tolerance_of(precision, first, others)
            rows.append(row_of(kind, list(differences(first, second, tolerance))))
    return rows


def _kinds(file: Path, parameters: Collection[str]) -> dict[str, Any]:
    """Return the values of a checkpoint. Keys are the kinds of values."""
    state = torch.load(file, weights_only=False)
    return {
        "weights": {key: value for key, value in state["state_dict"].items() if key in parameters},
        "buffers": {key: value for key, value in state["state_dict"].items() if key not in parameters},
        "optimizer": state["optimizer_states"],
        "schedules": state["lr_schedulers"],
    }


def row_of(kind: str, values: Sequence[Difference]) -> ComparedRow:
    """Return the row for all values of a kind, such as the weights.

    If all values are equal up to rounding errors, the row's text shows the largest difference. Otherwise it shows the
    difference that exceeds its allowed size by the largest factor. Weights that are NaN in both runs show nothing about
    the strategy, so they are not called equal.
    """
    unequal = [difference for difference in values if not difference.is_equal]
    undefined = [difference.name for difference in values if difference.is_undefined]
    if not unequal and undefined and kind in DEFINED:
        text = f"{len(undefined)} of {len(values)} are NaN in both runs, so they show nothing: {undefined[0]}; the "
        return ComparedRow(kind, f"{text}training fails on one device as well, so look at its loss first", equal=False)
    if not unequal:
        largest = max([difference.size for difference in values] + [0.0])
        note = f"; NaN in both runs: {', '.join(undefined)}" if undefined else ""
        return ComparedRow(kind, f"equal: {len(values)} compared, largest difference {largest:.1e}{note}")
    worst = max(unequal, key=lambda difference: difference.size / difference.allowed)
    how = "only in one run, or of different shapes" if math.isinf(worst.size) else f"by {worst.size:.1e}"
    text = f"{len(unequal)} of {len(values)} differ, most strongly {worst.name} ({how})"
    return ComparedRow(kind, text, equal=False)


def differences(reference: Any, tested: Any, tolerance: Tolerance, name: str = "") -> Iterator[Difference]:
    """Yield the difference of each tensor and number in two nested structures of mappings, lists and tuples.

    Values of other types, such as strings, are skipped.
    """
    if isinstance(reference, Mapping) and isinstance(tested, Mapping):
        for key in {**reference, **tested}:
            yield from differences(
                reference.get(key), tested.get(key), tolerance, f"{name}.{key}" if name else str(key)
            )
    elif isinstance(reference, (list, tuple)) and isinstance(tested, (list, tuple)) and len(reference) == len(tested):
        for index, pair in enumerate(zip(reference, tested, strict=True)):
            yield from differences(*pair, tolerance, f"{name}[{index}]")
    elif _is_number(reference) and _is_number(tested):
        yield _difference(torch.as_tensor(reference), torch.as_tensor(tested), tolerance, name)
    elif _is_number(reference) or _is_number(tested) or isinstance(reference, Mapping) != isinstance(tested, Mapping):
        yield Difference(name, math.inf, 1.0)


def _is_number(value: object) -> bool:
    return isinstance(value, (Tensor, int, float))


def _difference(reference: Tensor, tested: Tensor, tolerance: Tolerance, name: str) -> Difference:
    if reference.shape != tested.shape:
        return Difference(name, math.inf, 1.0)
    if not reference.numel():
        return Difference(name, 0.0, 1.0)
    reference, tested = reference.detach().cpu().double(), tested.detach().cpu().double()
    same = (reference == tested) | (reference.isnan() & tested.isnan())
    size = torch.where(same, 0.0, (reference - tested).abs()).nan_to_num(math.inf).max()
    scale = reference.nan_to_num(0.0, 0.0, 0.0).abs().max()
    is_undefined = bool((reference.isnan() & tested.isnan()).any())
    return Difference(name, float(size), tolerance.allowed(name, float(scale)), is_undefined)
