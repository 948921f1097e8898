"""Records of layers in some steps, and what ranks with other records are told."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from cnnstrategies.guarding.agreement import disagreements
from cnnstrategies.guarding.findings import Finding
from cnnstrategies.guarding.forwards import RECORDED, ForwardRecords
from cnnstrategies.recording.steps import StepRecorder

Step = Callable[[nn.Module, int], None]


def plain(module: nn.Module, batch: int) -> None:
    module(torch.ones(2, 3))


def in_bfloat16(module: nn.Module, batch: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain(module, batch)


def twice(module: nn.Module, batch: int) -> None:
    plain(module, batch)
    plain(module, batch)


def twice_in_evaluation_mode(module: nn.Module, batch: int) -> None:
    plain(module, batch)
    plain(module.eval(), batch)
    module.train()


def sometimes_twice(module: nn.Module, batch: int) -> None:
    (twice if batch % 2 else plain)(module, batch)


def never(module: nn.Module, batch: int) -> None:
    """Skip the module, as some networks do at random."""


def findings(steps: Step, batches: int = RECORDED + 2, later: Step = never) -> list[Finding]:
    """Return the findings about two ranks, of which the second one makes other steps, and calls a function later."""
    rows, values = [], []
    for function, hook in ((plain, never), (steps, later)):
        module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.ReLU())
        records = ForwardRecords(module)
        recorder = StepRecorder([records])
        for batch in range(batches):
            recorder.begin_batch(None, batch, batch)
            function(module, batch)
            recorder.end_batch(None)
            hook(module, batch)
        values = list(records.take())
        rows.append([(value.content, 0) for value in values])
    return disagreements(values, torch.tensor(rows), 20)


@pytest.mark.light
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (plain, []),
        (in_bfloat16, [("0 (and 1 others)", "computes in another precision than on rank 0", False)]),
        (twice, [("1", "is called in training mode another number of times in each step than on rank 0", True)]),
        (twice_in_evaluation_mode, []),
        (sometimes_twice, []),
        (never, []),
    ],
)
def test_another_precision_and_further_calls_in_each_step_are_named(
    steps: Step, expected: list[tuple[str, str, bool]]
) -> None:
    results = findings(steps)
    assert [(finding.tensor, finding.fault, finding.is_note) for finding in results] == expected
    assert all((finding.check, finding.rank) == ("forwards", 1) for finding in results)


@pytest.mark.light
def test_calls_in_a_hook_after_the_batch_are_named() -> None:
    (finding,) = findings(plain, later=plain)
    assert finding.fault.startswith("is called in training mode another number of times")


@pytest.mark.light
def test_too_few_batches_show_nothing() -> None:
    assert findings(twice, RECORDED - 1) == []
