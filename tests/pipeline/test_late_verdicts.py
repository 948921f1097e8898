"""Tests of verdicts on gradients that no backward waits for, on a simulated GPU."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.gradient_check import GradientComparison, GradientVerdict, begin_comparison
from cnnstrategies.pipeline.late_verdicts import LateVerdicts
from cnnstrategies.placed import DeviceLink, GlooLink, Places
from tests.pipeline.test_declared_loss import PROGRAMS, on_one_device, train
from tests.pipeline.test_placed_network import check_equal
from tests.runner.ranks import run_apart, run_ranks
from tests.runner.simulated_cuda import simulate
from tests.runner.simulated_gpu import DEVICE

# Programs that train as on one device, and programs whose gradients are found to be others after the step.
RIGHT = ["twice", "infinite", "later"]
WRONG = {"tiny": "in other ways than by one call of loss()", "other_values": "so loss() is not a mean over samples"}


class Trained(NamedTuple):
    """Result of a program on a rank: its result or the error message, and the waits of the host for its verdicts."""

    result: Any
    waits: Counter[str]


def train_on_gpu() -> list[Trained]:
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    with simulate(rank, size):
        everyone = dist.group.WORLD
        group = dist.new_group(range(size), backend="gloo")
        assert isinstance(everyone, dist.ProcessGroup)
        assert isinstance(group, dist.ProcessGroup)
        places = Places(rank, size, GlooLink(group, rank, size), DeviceLink(everyone, DEVICE.name))
        for name in [*RIGHT, *WRONG]:
            with DEVICE.waits_inside() as waits:
                try:
                    result = train(name, (1, 1), places, device=DEVICE.name)
                except ConfigurationError as error:
                    result = str(error)
            files = Counter(file for wait in waits.elements() for file in FILES if f"{file}.py" in wait)
            results.append(Trained(result, files))
    places.messages.close()
    return results


FILES = ("gradient_check", "loss_verdict", "late_verdicts")


@pytest.mark.cluster
def test_backwards_do_not_wait_for_the_device_and_wrong_gradients_end_the_run() -> None:
    for rank, results in enumerate(run_ranks(2, train_on_gpu)):
        for name, (result, waits) in zip([*RIGHT, *WRONG], results, strict=True):
            if name in WRONG:
                assert "the gradients of training step 4 of this run were not those" in result, name
                assert WRONG[name] in result
                assert "schedule: gpipe" in result
            else:
                check_equal(result[0], on_one_device(name))
                assert result[1] is PROGRAMS[name] or PROGRAMS[name] in result[1]
            # In the last stage, the first batch of each of two sizes reads its verdict at once, and the end of the
            # training reads the late ones.
            assert waits["gradient_check"] == 2 * rank, (name, waits)
            assert not waits["loss_verdict"], (name, waits)


def late_verdicts() -> None:
    with simulate():
        ones = torch.ones(4, 3, device="cuda")

        def begun(arrived: Any, expected: Any = ones, scale: Any = 1.0) -> GradientComparison:
            loss = torch.ones((), device="cuda")
            comparison = begin_comparison([arrived], [arrived], loss, scale, lambda: [(arrived, expected)])
            assert isinstance(comparison, GradientComparison)
            return comparison

        late = LateVerdicts()
        with DEVICE.waits_inside() as waits:
            for step, comparison in enumerate([begun(ones), begun(ones / 0), begun(2 * ones)]):
                late.add(comparison, step)
                # The simulated GPU says once of each event that it has not happened.
                assert not late.failure()
            assert "training step 2 of this run" in late.failure()
            assert not waits
        infinite = begun(ones / 0)
        assert bool(infinite.factor.isnan()), "a gradient scaler must skip the step"
        assert infinite.read() == GradientVerdict("infinite")
        # The scale of a microbatch's loss may be too large where that of the batch, divided by a number, is not.
        for scale, kind in ((1.0, "different"), (torch.ones((), device="cuda"), "infinite")):
            assert begun(ones, ones / 0, scale).read().kind == kind
        late.add(begun(2 * ones), 7)
        assert "training step 7" in late.failure(wait=True)


@pytest.mark.light
def test_verdicts_are_read_when_they_have_arrived() -> None:
    run_apart(late_verdicts)
