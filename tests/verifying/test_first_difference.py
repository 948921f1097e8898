"""Tests of the comparison of traces: which value is found first, on which rank, and what rounding explains."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cnnstrategies.verifying.causes import likely_cause
from cnnstrategies.verifying.first_difference import LEAST, TraceComparison
from cnnstrategies.verifying.tracer import BLOCK, ModuleNote, SketchedValue, Trace, sketch_of

pytestmark = pytest.mark.light
OUTPUT = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trace(*values: tuple[Any, str, Sequence[Tensor]], samples: int = 8) -> Trace:
    """Return a trace of one step. A value has a kind, a name, and the tensors of its calls."""
    sketched = [
        SketchedValue(0, kind, name, call, sketch_of(tensor, by_sample=kind in ("output", "gradient")))
        for kind, name, tensors in values
        for call, tensor in enumerate(tensors)
    ]
    return Trace(sketched, [samples], {"layer": ModuleNote("Conv2d", False, ())})


def compared(reference: Trace, ranks: Sequence[Trace], noisy: Sequence[Trace] = (), ranks_per_batch: int = 1) -> Any:
    return TraceComparison(reference, ranks, noisy, ranks_per_batch, LEAST["64-true"])


def changed(row: int, by: float = 0.1) -> Tensor:
    output = OUTPUT.clone()
    output[row, 0] += by
    return output


@pytest.mark.parametrize("row", range(8))
def test_the_rank_and_microbatch_of_a_changed_sample_are_found(row: int) -> None:
    reference = trace(("output", "layer", [OUTPUT]))
    ranks = [trace(("output", "layer", changed(row)[4 * rank : 4 * rank + 4].split(2))) for rank in range(2)]
    difference = compared(reference, ranks).first()
    assert (difference.name, difference.ranks, difference.microbatch) == ("layer", (row // 4,), row % 4 // 2)
    assert difference.agreeing == (1 - row // 4,)
    assert str(difference).startswith(f"first: output of layer, step 1, microbatch {row % 4 // 2}, rank {row // 4}: ")
    size = 0.1 / float(OUTPUT.square().sum(1).mean().sqrt())
    assert size / 3 < difference.size < size * 3, "the size of the difference follows from sketches"


def test_each_rank_of_a_group_may_have_the_whole_value() -> None:
    reference = trace(("output", "layer", [OUTPUT]))
    assert compared(reference, [reference, reference]).first() is None
    assert compared(reference, [reference, trace(("output", "layer", [changed(3)]))]).first().ranks == (1,)
    halves = [trace(("output", "layer", [half])) for half in OUTPUT.split(4) for _ in range(2)]
    assert compared(reference, halves, ranks_per_batch=2).first() is None


def test_rows_that_cannot_be_found_are_not_compared() -> None:
    reference = trace(("output", "layer", [OUTPUT]))
    assert compared(reference, [trace(("output", "layer", [changed(0)[:3]]))] * 2).first() is None


def test_differences_that_rounding_explains_are_not_named() -> None:
    reference = trace(("output", "layer", [OUTPUT]))
    ranks = [trace(("output", "layer", [changed(0, 1e-6)]))]
    assert compared(reference, ranks).first() is not None
    noisy = [trace(("output", "layer", [changed(row, 3e-7)])) for row in (1, 2)]
    assert compared(reference, ranks, noisy).first() is None


def test_gradients_may_have_a_factor_on_each_rank_that_is_the_same_for_all_modules() -> None:
    def gradients(factor: float, other: float, rows: slice) -> Trace:
        return trace(("gradient", "head", [factor * OUTPUT[rows]]), ("gradient", "layer", [other * OUTPUT[rows]]))

    reference = gradients(1, 3, slice(8))
    first, last = slice(4), slice(4, 8)
    assert compared(reference, [gradients(2, 6, first), gradients(4, 12, last)]).first() is None
    difference = compared(reference, [gradients(2, 6, first), gradients(4, 11, last)]).first()
    assert (difference.name, difference.ranks) == ("layer", (1,))


def test_gradients_of_parameters_are_compared_by_their_mean_over_the_ranks() -> None:
    def gradients(*factors: float, samples: int = 4) -> Trace:
        parts = zip(("a", "b"), factors, strict=True)
        return trace(*(("parameter gradient", name, [factor * OUTPUT]) for name, factor in parts), samples=samples)

    reference = gradients(1, 1)
    assert compared(reference, [gradients(0.5, 0.5), gradients(1.5, 1.5)]).first() is None
    assert compared(reference, [gradients(0, 0, samples=2), gradients(1.5, 1.5)]).first() is None
    difference = compared(reference, [gradients(1, 1), gradients(1, 1.5)]).first()
    assert (difference.name, difference.ranks, difference.agreeing) == ("b", (1,), (0,))


def test_weights_that_differ_after_a_step_have_a_cause_in_the_gradients_of_the_step() -> None:
    def steps(gradient: float, weight: float) -> Trace:
        values = [("parameter gradient", name, 1.0) for name in "ab"] + [("weight", "b", weight)]
        values[1] = ("parameter gradient", "b", gradient)
        sketched = [
            SketchedValue(int(kind == "weight"), kind, name, 0, sketch_of(factor * OUTPUT, by_sample=False))  # type: ignore[arg-type]
            for kind, name, factor in values
        ]
        return Trace(sketched, [4, 4])

    comparison = compared(steps(1, 1), [steps(0.5, 1.1), steps(1.5, 0.9)])
    difference = comparison.first()
    assert (difference.step, difference.kind, difference.ranks) == (2, "weight", (0, 1))
    assert likely_cause(difference, comparison).startswith(
        "a gradient that is not combined: the processes have different"
    )
    comparison = compared(steps(1, 1), [steps(1, 1), steps(1, 1.1)])
    cause = likely_cause(comparison.first(), comparison)
    assert cause.startswith("the optimizer's step or gradient clipping on rank 1 only: gradients agree, and b does not")


@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_sketch_shows_the_size_of_a_difference_in_any_block(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, count, generator=generator, dtype=torch.float64)
    for place in {0, count // 2, count - 1}:
        other = value.clone()
        other[1, place] += 0.5
        difference = sketch_of(value, by_sample=True) - sketch_of(other, by_sample=True)
        assert not difference[0].any()
        assert torch.allclose(difference[1].abs(), torch.tensor(0.5, dtype=torch.float64)), "the size of the change"
    moved = value.roll(BLOCK, dims=1)
    assert count <= BLOCK or not torch.allclose(sketch_of(moved, by_sample=True), sketch_of(value, by_sample=True))


def test_gradients_that_are_nan_in_both_runs_are_not_named() -> None:
    both = trace(("parameter gradient", "a", [torch.full((3,), torch.nan)]))
    assert compared(both, [both, both]).first() is None


def test_forwards_that_are_repeated_are_compared_once_and_calls_by_their_number() -> None:
    def run(changed_call: int | None) -> Trace:
        calls = [changed(2) if call == changed_call else (call + 1) * OUTPUT for call in range(2)]
        outputs = [
            SketchedValue(0, "output", "layer", call, sketch_of(value, by_sample=True), is_recorded)
            for is_recorded in (False, True)
            for call, value in enumerate(calls)
        ]
        gradients = [
            SketchedValue(0, "gradient", "layer", call, sketch_of(calls[call], by_sample=True)) for call in (1, 0)
        ]
        return Trace([*outputs, *gradients], [8])

    assert compared(run(None), [run(None)]).first() is None
    assert compared(run(None), [run(1)]).first().kind == "output"


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([("output", "a", [OUTPUT]), ("output", "b", [OUTPUT.log()])], "output of b"),
        ([("gradient", "b", [OUTPUT.log()]), ("loss", "", [torch.tensor(torch.nan)])], "the loss"),
        ([("gradient", "b", [OUTPUT.log()]), ("loss", "", [torch.tensor(1.0)])], "gradient of b"),
        ([("final gradient", "c", [torch.tensor(torch.inf)])], "final gradient of c"),
    ],
)
def test_the_first_undefined_value_of_one_device_is_named(values: Any, place: str) -> None:
    both = trace(*values)
    assert compared(both, [both]).first_undefined() == f"first NaN or infinity, also on one device: {place}, step 1"
    both = trace(("output", "a", [OUTPUT]))
    assert compared(both, [both]).first_undefined() == ""
