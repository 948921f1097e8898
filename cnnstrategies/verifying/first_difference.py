"""Find the first value in which a run under a strategy differs from the run on one device, by the traces of both."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies.verifying.batches import Precision
from cnnstrategies.verifying.tracer import Kind, SketchedValue, Trace
from cnnstrategies.verifying.verdict import FACTOR

# Order in which the values of a step are compared. Within a group, values are in the order in which one device has
# computed them. The loss is not among them, because the loss of a rank is that of its own samples.
ORDER: tuple[tuple[Kind, ...], ...] = (("weight", "buffer"), ("input", "output"), ("gradient",))
GRADIENTS: tuple[Kind, ...] = ("parameter gradient", "final gradient")  # Compared after all other values of a step.
# Differences that rounding always explains, relative to the size of the value. Keys are the precisions of the runs.
LEAST: dict[Precision, float] = {"64-true": 1e-11, "32-true": 1e-5, "bf16-mixed": 1e-2, "16-mixed": 1e-3}

Key = tuple[int, Kind, str]  # Step, kind and name of values.


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs between the runs.

    Attributes:
        step: Number of the batch, beginning with 1.
        kind: Kind of the value.
        name: Name of the module, the parameter or the buffer.
        ranks: Ranks on which the value differs.
        microbatch: Number of the microbatch in which the value differs on the first of these ranks, beginning with 0.
            None if the rank does not divide its batch.
        size: Largest difference in a sample, relative to the size of the value.
        rounding: Difference that errors of rounding make on one device, in the same measure.
        agreeing: Ranks that have the value, too, and agree with one device.
        previous: Name of the module whose output is the last one before this value that agrees; empty if there is none.
        is_at_end: Whether the value is that at the end of the run; its step follows the last one.
    """

    step: int
    kind: Kind
    name: str
    ranks: tuple[int, ...]
    microbatch: int | None
    size: float
    rounding: float
    agreeing: tuple[int, ...] = ()
    previous: str = ""
    is_at_end: bool = False

    def __str__(self) -> str:
        step = f"after the last step ({self.step - 1})" if self.is_at_end else f"step {self.step}"
        microbatch = "" if self.microbatch is None else f"microbatch {self.microbatch}, "
        return (
            f"first: {self.kind} of {self.name}, {step}, {microbatch}rank {self.ranks[0]}: differs by "
            f"{self.size:.1e} of its size, where rounding explains {self.rounding:.0e}"
        )


@dataclass(frozen=True)
class _Part:
    """Sketch of a value on one rank, and the rows of one device's value that it should be equal to."""

    rank: int
    microbatch: int | None
    sketch: Tensor
    expected: Tensor


class TraceComparison:
    """Comparison of the traces of all ranks with the trace of one device.

    Args:
        reference: Trace of one device.
        ranks: Traces of the ranks, in their order.
        noisy: Traces of one device with errors of rounding.
        ranks_per_batch: Number of consecutive ranks that have the same batch.
        least: Largest relative difference that rounding always explains; one of :data:`LEAST`.
    """

    def __init__(
        self, reference: Trace, ranks: Sequence[Trace], noisy: Sequence[Trace], ranks_per_batch: int, least: float
    ) -> None:
        self.reference = reference
        self._ranks = ranks
        self._ranks_per_batch = ranks_per_batch
        self._least = least
        self._values = _by_key(reference)
        # Position of each value among those with its key. Values of forwards that are repeated are not among them.
        self._positions = {id(value): place for values in self._values.values() for place, value in enumerate(values)}
        self._rank_values = [_by_key(trace) for trace in ranks]
        self._noisy_values = [_by_key(trace) for trace in noisy]

    def first(self) -> FirstDifference | None:
        """Return the first value that differs by more than rounding explains; None if there is no such value."""
        for step in range(len(self.reference.samples) + 1):
            if difference := self._first_value(step):
                return difference
            for kind in GRADIENTS:
                if difference := self._first_parameter_gradient(step, kind):
                    return difference
        return None

    def first_undefined(self) -> str:
        """Return where the run on one device has computed its first NaN or infinity, as a text; empty if nowhere."""
        for value in self.reference.values:
            if not value.sketch.isfinite().all():
                losses = self._values.get((value.step, "loss", ""), [])
                is_loss = value.kind == "gradient" and any(not loss.sketch.isfinite().all() for loss in losses)
                place = "the loss" if is_loss or not value.name else f"{value.kind} of {value.name}"
                return f"first NaN or infinity, also on one device: {place}, step {value.step + 1}"
        return ""

    def loss_differs(self, step: int) -> bool:
        """Whether the mean of the ranks' losses, weighted by their samples, differs from the loss of one device.

        Args:
            step: Number of the batch, beginning with 1.
        """
        key: Key = (step - 1, "loss", "")
        return key in self._values and self._mean_difference(key) > self._allowed(self._rounding(key, 0))

    def is_not_combined(self, step: int, name: str) -> bool:
        """Whether the ranks have different gradients of a parameter, and equal gradients of other parameters.

        Args:
            step: Number of the batch, beginning with 1.
            name: Name of the parameter.
        """
        keys = [key for key in self._values if key[0] == step - 1 and key[1] == "parameter gradient"]
        sketches = {key: [values[key][0].sketch for values in self._rank_values if key in values] for key in keys}
        equal = {key[2]: _are_equal(parts) for key, parts in sketches.items()}
        return not equal.get(name, True) and any(equal.values())

    def _first_value(self, step: int) -> FirstDifference | None:
        previous = ""
        scales: dict[int, float] = {}
        for kinds in ORDER:
            for value in (value for value in self.reference.values if value.step == step and value.kind in kinds):
                if id(value) not in self._positions:
                    continue
                key: Key = (step, value.kind, value.name)
                position = self._positions[id(value)]
                rounding = self._rounding(key, position)
                parts = self._parts(key, position)
                if value.kind == "gradient":
                    parts = _scaled(parts, scales)
                sizes = [(part, _relative(part.sketch - part.expected, value.sketch)) for part in parts]
                differing = [(part, size) for part, size in sizes if size > self._allowed(rounding)]
                if differing:
                    ranks = sorted({part.rank for part, _ in differing})
                    first = next(part for part, _ in differing if part.rank == ranks[0])
                    return FirstDifference(
                        step=step + 1,
                        kind=value.kind,
                        name=value.name,
                        ranks=tuple(ranks),
                        microbatch=first.microbatch,
                        size=max(size for _, size in differing),
                        rounding=rounding,
                        agreeing=tuple(sorted({part.rank for part in parts} - set(ranks))),
                        previous=previous,
                        is_at_end=step == len(self.reference.samples),
                    )
                if value.kind == "output" and parts:
                    previous = value.name
        return None

    def _first_parameter_gradient(self, step: int, kind: Kind) -> FirstDifference | None:
        """Return the first gradient of a parameter that differs, in the order of the backward pass.

        Under a parameter server, each rank has the gradient of its own samples, and the mean of them is compared.
        """
        for key in reversed([key for key in self._values if key[:2] == (step, kind)]):
            rounding = self._rounding(key, 0)
            if self._mean_difference(key) <= self._allowed(rounding):
                continue
            value = self._values[key][0].sketch
            sizes = {
                rank: _relative(values[key][0].sketch - value, value)
                for rank, values in enumerate(self._rank_values)
                if key in values
            }
            ranks = tuple(rank for rank, size in sizes.items() if size > self._allowed(rounding))
            if not ranks:
                continue  # The gradients are NaN in both runs.
            agreeing = tuple(rank for rank in sizes if rank not in ranks)
            return FirstDifference(step + 1, key[1], key[2], ranks, None, max(sizes.values()), rounding, agreeing)
        return None

    def _allowed(self, rounding: float) -> float:
        return max(FACTOR * rounding, self._least)

    def _rounding(self, key: Key, position: int) -> float:
        """Return the largest difference that errors of rounding have made in a value on one device."""
        count = len(self._values[key])
        noisy = [values[key][position].sketch for values in self._noisy_values if len(values.get(key, ())) == count]
        value = self._values[key][position].sketch
        return max((_relative(sketch - value, value) for sketch in noisy if sketch.shape == value.shape), default=0.0)

    def _mean_difference(self, key: Key) -> float:
        """Return the relative difference of the mean of the ranks' values, weighted by their numbers of samples."""
        value = self._values[key][0].sketch
        parts = [
            (trace.samples[key[0]], values[key][0].sketch)
            for trace, values in zip(self._ranks, self._rank_values, strict=True)
            if key in values
        ]
        if not parts:
            return 0.0
        mean = sum((count * part for count, part in parts), torch.zeros(())) / max(1, sum(count for count, _ in parts))
        return _relative(mean - value, value)

    def _parts(self, key: Key, position: int) -> list[_Part]:
        """Return the ranks' parts of a value. The list is empty if their rows cannot be found in the value.

        Each rank may have the whole value. Otherwise the parts have its rows, in the order of ranks and microbatches.

        Args:
            key: Step, kind and name of the value.
            position: Number of the value among those with this key on one device.
        """
        whole = self._values[key][position].sketch
        count = len(self._values[key])
        rows: list[tuple[int, int | None, Tensor]] = []
        for rank, values in enumerate(self._rank_values):
            same_key = values.get(key, [])
            if len(same_key) % count:
                return []
            sketches = [value.sketch for value in same_key[position::count]]
            rows += [(rank, index if len(sketches) > 1 else None, part) for index, part in enumerate(sketches)]
        if all(len(part) == len(whole) for _, _, part in rows):
            return [_Part(*part, whole) for part in rows]
        if sum(len(part) for _, _, part in rows) != len(whole):
            rows = [part for part in rows if part[0] % self._ranks_per_batch == 0]
        if sum(len(part) for _, _, part in rows) != len(whole):
            return []
        ends = itertools.accumulate(len(part) for _, _, part in rows)
        return [_Part(*part, whole[end - len(part[2]) : end]) for part, end in zip(rows, ends, strict=True)]


def _by_key(trace: Trace) -> dict[Key, list[SketchedValue]]:
    """Return the values that a rank holds by their keys. Gradients are in the order of the module's calls.

    If forwards are repeated to compute activations again, only those that autograd has recorded are kept.
    """
    values: dict[Key, list[SketchedValue]] = defaultdict(list)
    for value in (value for value in trace.values if value.is_held):
        values[value.step, value.kind, value.name].append(value)
    for key, same_key in values.items():
        if key[1] == "gradient":
            same_key.sort(key=lambda value: value.call)
        elif any(value.is_recorded for value in same_key):
            values[key] = [value for value in same_key if value.is_recorded]
    return dict(values)


def _relative(difference: Tensor, value: Tensor) -> float:
    """Return the largest size of a sample's difference, relative to the size of the value.

    Args:
        difference: Difference of two sketches.
        value: Sketch of the value; its mean size over all samples is the measure.
    """
    if not difference.numel() or not bool(difference.any()):
        return 0.0
    largest = float(difference.square().mean(1).max().sqrt())
    size = float(value.square().mean().sqrt())
    return largest / size if size > 0 else largest


def _scaled(parts: Sequence[_Part], scales: dict[int, float]) -> list[_Part]:
    """Divide the gradients of each rank by a factor that is the same for all its values.

    The loss of a rank may be a mean over its own samples. Then its gradients are larger than those of one device by a
    factor, which the mean over the ranks takes back. The factor follows from the first gradient of a backward pass.

    Args:
        parts: Parts of a gradient.
        scales: The factors. Keys are the ranks. Missing factors are added.
    """
    for rank in {part.rank for part in parts} - scales.keys():
        pairs = [(part.sketch, part.expected) for part in parts if part.rank == rank]
        square = sum(float(expected.square().sum()) for _, expected in pairs)
        product = sum(float((sketch * expected).sum()) for sketch, expected in pairs)
        if square and product:
            scales[rank] = product / square
    return [
        _Part(part.rank, part.microbatch, part.sketch / scales.get(part.rank, 1.0), part.expected) for part in parts
    ]


def _are_equal(sketches: Sequence[Tensor]) -> bool:
    return all(torch.equal(sketch, sketches[0]) for sketch in sketches)
