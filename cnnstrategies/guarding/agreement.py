"""Comparison of the checksums of ranks that should have equal values."""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies.guarding.findings import Finding, and_others

ValueKind = Literal["option", "mode", "precision", "calls", "weight", "state", "buffer"]
OF_FORWARDS = ("precision", "calls")  # Kinds of values that a rank does not know if they are 0.
SINCE = "continue from the last verified checkpoint, and look for the line with `cnnstrategies verify`"


@dataclass(frozen=True)
class ComparedValue:
    """A value that should be equal on some ranks.

    Attributes:
        kind: Kind of the value.
        name: Name of the value.
        content: The tensors or the number of which a checksum is compared. Empty on ranks that do not hold the value.
        holders: Ranks that hold the value; None if all ranks do.
        always: Whether the values must be equal, and not only change on the same ranks.
    """

    kind: ValueKind
    name: str
    content: tuple[Tensor, ...] | int
    holders: tuple[int, ...] | None = None
    always: bool = True


def number_of(value: Any) -> int:
    """Return a checksum of a number or another plain value."""
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return zlib.crc32(repr(value).encode())


def options_of(optimizers: Sequence[Optimizer]) -> Iterator[ComparedValue]:
    """Yield the learning rate and the other options of each parameter group."""
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            place = f"parameter group {number}" + (f" of optimizer {index}" if len(optimizers) > 1 else "")
            plain = {
                key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else value
                for key, value in group.items()
                if key != "params"
            }
            if "lr" in plain:
                yield ComparedValue("option", f"learning rate of {place}", number_of(float(plain.pop("lr"))))
            rest = {key: value for key, value in plain.items() if isinstance(value, int | float | str | tuple)}
            yield ComparedValue("option", f"options of {place}", number_of(rest))


def states_of(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[Tensor, ...]:
    """Return the tensors of an optimizer's state for a parameter, in the order of their names."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    dense = (state[key] for key in sorted(state, key=str))
    return tuple(value for value in dense if isinstance(value, Tensor) and value.layout is torch.strided)


def disagreements(values: Sequence[ComparedValue], gathered: Tensor, step: int) -> list[Finding]:
    """Return a finding for each kind of values that are not equal.

    Args:
        values: The values.
        gathered: For each rank and value: its checksum, and whether it has changed since the last check
            (ranks, values, 2).
        step: Number of steps before the check.
    """
    wrong: dict[ValueKind, list[tuple[ComparedValue, int, int]]] = {}
    differ = (gathered[..., 0] != gathered[0, :, 0]).any(0)
    for index in differ.nonzero().flatten().tolist():
        value = values[index]
        ranks: Sequence[int] = range(len(gathered)) if value.holders is None else value.holders
        if value.kind in OF_FORWARDS:
            ranks = [rank for rank in ranks if gathered[rank, index, 0]]
        digests = [int(gathered[rank, index, 0]) for rank in ranks]
        changed = {bool(gathered[rank, index, 1]) for rank in ranks}
        if len(set(digests)) <= 1 or (not value.always and len(changed) == 1 and (step > 1 or changed == {True})):
            continue
        usual = Counter(digests).most_common(1)[0][0]
        odd = next(rank for rank, digest in zip(ranks, digests, strict=True) if digest != usual)
        wrong.setdefault(value.kind, []).append((value, odd, ranks[digests.index(usual)]))
    compared = sum(value.kind == "weight" for value in values)
    return [
        _finding(kind, wrong, compared, step)
        for kind in ("option", "mode", "precision", "calls", "weight", "state", "buffer")
        if kind in wrong and not (kind == "state" and "weight" in wrong)
    ]


def _finding(
    kind: ValueKind, wrong: Mapping[ValueKind, Sequence[tuple[ComparedValue, int, int]]], compared: int, step: int
) -> Finding:
    value, odd, usual = wrong[kind][0]
    names = [other.name for other, *_ in wrong[kind]]
    fault, remedy = f"differs from rank {usual}'s", SINCE
    if kind == "option":
        cause, remedy = (
            "code that runs on some ranks only, or a schedule on a metric that is not reduced",
            ("set options on all ranks alike, and log the metric with sync_dist=True"),
        )
    elif kind == "mode":
        cause, remedy = "train() or eval() on some ranks only", "call them on all ranks"
    elif kind == "precision":
        fault = f"computes in another precision than on rank {usual}"
        cause, remedy = "autocast, or a conversion, on some ranks only", "set the precision with trainer.precision"
        return Finding("forwards", odd, step, and_others(names), fault, cause, remedy)
    elif kind == "calls":
        fault = f"is called in training mode another number of times in each step than on rank {usual}"
        cause, remedy = "code that runs on some ranks only, as for a logger", "call eval() before it, and train() after"
        return Finding("forwards", odd, step, and_others(names), fault, cause, remedy, is_note=True)
    elif kind == "buffer":
        fault = f"differs from rank {usual}'s, and is not updated on all ranks alike"
        cause, remedy = "code that updates it on some ranks only, or a memory error", "update it on all ranks"
    elif kind == "state":
        value_names = "optimizer state of "
        cause = "the state was loaded or changed on one rank only, or a memory error"
        return Finding("replicas", odd, step, value_names + and_others(names), fault, cause, remedy)
    elif "option" in wrong:
        cause = "the learning rates or other options differ"
    elif len(names) == compared and compared > 1:
        cause = "the ranks began with other weights, or their gradients are not averaged"
    elif value.name in {other.name for other, *_ in wrong.get("state", ())}:
        cause = (
            "its gradient is not averaged: it was unfrozen or added late, or has a hook on one rank; or a memory error"
        )
    else:
        cause = "code other than the optimizer has changed it on one rank, or a memory error"
    return Finding("replicas", odd, step, and_others(names), fault, cause, remedy)
