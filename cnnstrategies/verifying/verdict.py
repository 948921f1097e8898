"""Two runs compared: what is equal, and what differs first, by how much and after which step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-4}  # of a tensor's largest value, by the precision of a run
ABSOLUTE = {torch.float64: 1e-11, torch.float32: 1e-6}


@dataclass(frozen=True)
class Difference:
    """How far a tensor or a number of a checkpoint is from that of one device.

    Attributes:
        size: The largest difference of its values; infinite where only one of the runs has it, or the shapes differ.
        allowed: The largest that is taken for rounding.
    """

    name: str
    size: float
    allowed: float

    @property
    def is_equal(self) -> bool:
        """Up to rounding."""
        return self.size <= self.allowed


@dataclass(frozen=True)
class ComparedRow:
    """A line of a verdict: a name, what is said of it, and whether it is as on one device."""

    name: str
    text: str
    equal: bool = True


@dataclass(frozen=True)
class Verdict:
    """Whether a strategy has trained the same model as one device.

    Attributes:
        rows: Of what was compared.
        notes: What was turned off for it, and what explains a difference.
    """

    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether all of it is."""
        return all(row.equal for row in self.rows)

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = ["equal to one device" if self.equal else "NOT equal to one device"]
        lines += [f"  {row.name:{wide}}  {row.text}" for row in self.rows]
        return "\n".join([*lines, *(f"  - {note}" for note in self.notes)])


def compared(one: Path, many: Path, parameters: Sequence[str], dtype: torch.dtype) -> list[ComparedRow]:
    """What two checkpoints have: weights (of these parameters), buffers, optimizers' states and schedules'."""
    states = [torch.load(file, weights_only=False) for file in (one, many)]
    names = set(parameters)
    parts = {
        "weights": [{key: value for key, value in state["state_dict"].items() if key in names} for state in states],
        "buffers": [{key: value for key, value in state["state_dict"].items() if key not in names} for state in states],
        "optimizer": [state["optimizer_states"] for state in states],
        "schedules": [state["lr_schedulers"] for state in states],
    }
    return [row_of(kind, list(differences(pair[0], pair[1], dtype))) for kind, pair in parts.items() if any(pair)]


def row_of(kind: str, found: Sequence[Difference]) -> ComparedRow:
    """What is said of all differences of a kind: the largest of rounding, or the one that is furthest from it."""
    unequal = [one for one in found if not one.is_equal]
    if not unequal:
        return ComparedRow(
            kind, f"equal: {len(found)} compared, largest difference {max([one.size for one in found] + [0.0]):.1e}"
        )
    worst = max(unequal, key=lambda one: one.size / one.allowed)
    by = "is in one of the runs alone" if math.isinf(worst.size) else f"by {worst.size:.1e}"
    return ComparedRow(kind, f"{len(unequal)} of {len(found)} differ, most of all {worst.name} {by}", equal=False)


def differences(one: Any, many: Any, dtype: torch.dtype, name: str = "") -> Iterator[Difference]:
    """All tensors and numbers of two trees of mappings and lists; what is neither is passed over."""
    if isinstance(one, Mapping) and isinstance(many, Mapping):
        for key in {**one, **many}:
            yield from differences(one.get(key), many.get(key), dtype, f"{name}.{key}" if name else str(key))
    elif isinstance(one, (list, tuple)) and isinstance(many, (list, tuple)) and len(one) == len(many):
        for index, pair in enumerate(zip(one, many, strict=True)):
            yield from differences(*pair, dtype, f"{name}[{index}]")
    elif _is_number(one) and _is_number(many):
        yield _difference(torch.as_tensor(one), torch.as_tensor(many), dtype, name)
    elif _is_number(one) or _is_number(many) or isinstance(one, Mapping) != isinstance(many, Mapping):
        yield Difference(name, math.inf, 1.0)


def _is_number(value: object) -> bool:
    return isinstance(value, (Tensor, int, float))


def _difference(one: Tensor, many: Tensor, dtype: torch.dtype, name: str) -> Difference:
    if one.shape != many.shape:
        return Difference(name, math.inf, 1.0)
    if not one.numel():
        return Difference(name, 0.0, 1.0)
    one, many = one.detach().cpu().double(), many.detach().cpu().double()
    same = (one == many) | (one.isnan() & many.isnan())
    size = torch.where(same, 0.0, (one - many).abs()).nan_to_num(math.inf).max()
    scale = one.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return Difference(name, float(size), RELATIVE[dtype] * float(scale) + ABSOLUTE[dtype])
