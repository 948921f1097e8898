"""Faults at named moments of a run's real processes: what was promised holds.

A number after a trace is the seed of the simulator that first met it: `data_mutants` takes the guarantee away again.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from replay import EPOCH, SLICE, STEPS, Outcome, Plan, expected, replay

Check = Callable[[Plan, Outcome], None]
Slices = list[torch.Tensor]


def same(plan: Plan, outcome: Outcome) -> None:
    """Every worker ends with what one process makes of all gradients, each of them counted once."""
    want = expected(plan, lambda step: range(plan.workers))
    assert not outcome.errors, outcome
    assert len(outcome.values) == plan.workers
    for worker, values in outcome.values.items():
        assert _close(values, want), (worker, values, want)
    assert "are lost" not in outcome.output


def same_bits(plan: Plan, outcome: Outcome) -> None:
    """Nor is there a difference in the last bit: all numbers of a trace are exact."""
    same(plan, outcome)
    want = expected(plan, lambda step: range(plan.workers))
    for values in outcome.values.values():
        assert all(torch.equal(one, other) for one, other in zip(values, want, strict=True))


def without(worker: int, back: bool = False) -> Check:
    """From some step on the others go on without it, until it comes back; of no step there is only a part."""

    def check(plan: Plan, outcome: Outcome) -> None:
        until = EPOCH if back else STEPS
        others = [one for one in range(plan.workers) if one != worker]
        results = [
            expected(plan, lambda step, first=first: others if first <= step < until else range(plan.workers))
            for first in range(EPOCH)
        ]
        assert not outcome.errors, outcome
        assert sorted(outcome.values) == (list(range(plan.workers)) if back else others)
        for values in outcome.values.values():
            assert any(_close(values, result) for result in results), (values, results)

    return check


def ends(text: str) -> Check:
    """Every worker is told why it ends."""

    def check(plan: Plan, outcome: Outcome) -> None:
        assert not outcome.values
        assert sorted(outcome.errors) == list(range(plan.workers))
        for error in outcome.errors.values():
            assert re.search(text, error), error

    return check


def lacks_what_it_says(plan: Plan, outcome: Outcome) -> None:
    """Each slice lacks steps that follow each other: at most, and one of them, what the only server says is lost."""
    said = re.findall(r"server 0 goes on from its last snapshot: (\d+) updates since then are lost", outcome.output)
    most = int(said[-1]) if said else 0
    results: dict[int, list[Slices]] = {}
    for lost in range(most + 1):
        for first in range(STEPS - lost + 1):
            left_out = range(first, first + lost)
            got = expected(plan, lambda step, left=left_out: () if step in left else range(plan.workers))
            results.setdefault(lost, []).append(_slices(got))
    assert not outcome.errors, outcome
    (values,) = outcome.values.values()
    lacks = [
        min((lost for lost, some in results.items() for one in some if _close([value], [one[number]])), default=-1)
        for number, value in enumerate(_slices(values))
    ]
    assert min(lacks) >= 0, (values, most)
    assert max(lacks) == most


def _slices(values: Sequence[torch.Tensor]) -> Slices:
    return [part for value in values for part in value.split(SLICE)]


def _close(values: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(values, want, strict=True))


def twice(*faults: str, check: Check = same, servers: int = 2, restarts: int = 0, **options: Any) -> tuple[Plan, Check]:
    """With a copy of each slice: nothing may be lost."""
    return Plan(faults, servers=servers, restarts=restarts, options={"replication": 2, **options}), check


# Of 24 answers to a worker 3 are before the first step, and 3 in each: one for each slice.
TRACES: dict[str, tuple[Plan, Check]] = {
    "a leader dies while it tells what it has decided (6)": twice(
        "server 0's 3rd DECIDE to server 2: kill", servers=3),
    "a vote is lost (8)": twice("server 1's 3rd VOTE to server 0: drop"),
    "options are lost, and the server that sent them dies (22)": twice(
        "server 0's 3rd RELAY_BEGIN to server 1: drop", "server 0's 1st COPY_STATE to server 1: kill"),
    "a copy is lost, and its server dies when it has answered (52)": twice(
        "server 0's 7th RELAY to server 1: drop", "server 0's 3rd PULLED to worker 0: last"),
    "a server comes back before the first values, and the other dies (1296)": twice(
        "server 1's 1st WELCOME to worker 0: kill", "worker 0's 1st VALUE to server 0: stop",
        "server 0's 10th PULLED to worker 0: kill", restarts=1),
    "a push that was applied is pushed again to the copy (13)": twice(
        "server 0's 5th PULLED to worker 0: kill", mode="async"),
    "the connection between two servers is cut": twice("server 1's 5th RELAY to server 0: cut"),
    "what a copy answers is lost": twice("server 1's 6th ACKNOWLEDGE to server 0: drop"),
    "a server dies during set-up": twice("server 0's 1st WELCOME to worker 1: kill"),
    "a worker's connection is cut within a step": twice(
        "worker 1's 5th PUSH to server 0: cut", "server 1's 8th PULLED to worker 0: drop"),
    "a server is stopped for a while": twice(
        "server 0's 6th RELAY to server 1: stop", "worker 1's 5th BEGIN to server 0: stop"),
    "a norm is lost, and the leader dies before all have the factor": twice(
        "server 1's 2nd NORM to server 0: drop", "server 0's 4th SCALE to server 1: kill", clip_norm=2.0),
    "connections are cut, and no gradient is applied twice": twice(
        "server 0's 5th RELAY to server 1: cut", "worker 0's 6th PUSH to server 1: cut", mode="async"),
    "a server dies under a bound of staleness": twice(
        "server 1's 8th PULLED to worker 0: kill", mode="ssp", staleness=1),
    "a server dies within an outer step": twice(
        "server 1's 8th PULLED to worker 0: kill", mode="local", check=same_bits),
    "what registers and gathers is lost": twice(
        "worker 1's 1st hello to coordinator: cut", "coordinator's 2nd view to server 1: drop",
        "worker 0's 2nd collect to coordinator: drop", "coordinator's 1st done to worker 1: drop"),
    "a worker dies between two steps (6)": (
        Plan(("worker 1's 3rd BEGIN to server 0: kill",)), without(1)),
    "a worker dies within a step": (Plan(("worker 1's 8th PUSH to server 0: kill",)), without(1)),
    "a worker is started again": (
        Plan(("worker 1's 3rd BEGIN to server 0: kill",), restarts=1, returns=True), without(1, back=True)),
    "rank 0 dies before all servers have the first values": (
        Plan(("worker 0's 2nd VALUE to server 0: kill",), restarts=1), without(0, back=True)),
    "rank 0 is started again": (
        Plan(("worker 0's 3rd BEGIN to server 0: kill",), restarts=1), without(0, back=True)),
    "the coordinator dies when it has told one of two workers a result, and what the other reports is lost": (
        Plan(("coordinator's 4th done to worker 1: kill", "worker 1's 2nd hello to coordinator: drop"), coordinates=1),
        same),
    "a server dies whose slices nobody else has": (
        Plan(("server 1's 8th PULLED to worker 0: kill",)),
        ends(r"server 1 \(process \d+ on .*its parameters are lost")),
    "a server dies after two snapshots (10)": (
        Plan(("server 0's 3rd SNAPSHOT: kill",), 1, 1, restarts=1, options={"snapshot_every": 2}), lacks_what_it_says),
    "a server dies that has applied a part of a step (28)": (
        Plan(("server 0's 3rd SNAPSHOT: kill",), 1, 1, restarts=1,
             options={"snapshot_every": 1, "mode": "async"}), lacks_what_it_says),
}  # fmt: skip


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.replace(" ", "_"))
def test_what_was_promised_holds(trace: str, tmp_path: Path) -> None:
    plan, check = TRACES[trace]
    check(plan, replay(plan, tmp_path))
