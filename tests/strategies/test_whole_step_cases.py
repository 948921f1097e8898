"""Programs as users write them: the whole step trains the same weights, logs and read values as one device.

``make test-cases`` runs all programs under all layouts.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_ranks
from tests.strategies.whole_step_cases import CASES, Case
from tests.strategies.whole_step_cases.checking import check, check_error

# Cases of several kinds, which `make test` runs with three steps.
FEW = (
    *("byol", "branch_on_loss", "lottery_ticket", "wasserstein_penalty", "gathered_contrast", "noise_in_hooks"),
    *("normalised_twice", "wasserstein_gan"),
)
# Cases of more kinds, for the cluster tests.
MORE = (
    *("kl_term", "logged_metric", "finite_loss", "small_unet", "global_list", "kept_features", "grad_cam"),
    *("reversible_blocks", "asks_the_strategy", "own_randomness", "unpacked_batch"),
)


def four_steps(names: Sequence[str]) -> list[Case]:
    """Return cases that train for one epoch of at most four steps; the case `finite_loss` leaves one of them out."""
    return [replace(CASES[name], epochs=1, samples=min(CASES[name].samples, 28)) for name in names]


def test_programs_of_several_kinds_train_as_on_one_device() -> None:
    check([replace(CASES[name], epochs=1, samples=20) for name in FEW], [1, 1])


@pytest.mark.cluster
@pytest.mark.parametrize(("replicas", "names"), [([1, 2], MORE), ([1, 1, 1], FEW)], ids=["1-2", "1-1-1"])
def test_programs_train_as_on_one_device_with_replicas_and_three_stages(
    replicas: list[int], names: Sequence[str]
) -> None:
    check(four_steps(names), replicas)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("replicas", "checkpointing", "names"), [([1, 1], "always", MORE), ([2, 1], "except_last", FEW)], ids=["1-1", "2-1"]
)
def test_programs_train_as_on_one_device_if_forwards_run_again(
    replicas: list[int], checkpointing: str, names: Sequence[str]
) -> None:
    check(four_steps(names), replicas, activation_checkpointing=checkpointing)


def validate(case: Case, devices: int) -> dict[str, float]:
    """Validate with automatic cuts, for which the images come from the validation data."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() if devices > 1 else 0), "NODE_RANK": "0"}
    os.environ["WORLD_SIZE"] = str(devices)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    strategy = HybridPipelineStrategy(stages=devices) if devices > 1 else "auto"
    trainer = quiet_trainer(strategy, devices)
    result: dict[str, float] = trainer.validate(case.module(), case.evaluation_loader(), verbose=False)[0]
    return result


@pytest.mark.cluster
@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.error])
def test_programs_that_the_documentation_lists_are_refused(name: str) -> None:
    check_error(CASES[name], [1, 1])


@pytest.mark.cluster
def test_validation_alone_chooses_cuts_by_the_validation_data() -> None:
    case = CASES["contexts_in_forward"]
    (expected,) = run_ranks(1, validate, case, 1)
    for result in run_ranks(2, validate, case, 2):
        assert result == pytest.approx(expected, rel=1e-12)
