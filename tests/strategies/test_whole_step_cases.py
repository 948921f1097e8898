"""Programs as users write them: the whole step trains the same weights, logs and read values as one device.

``make test-cases`` runs all programs under all layouts.
"""

from dataclasses import replace

import pytest
from whole_step_cases import CASES
from whole_step_cases.checking import check

# Cases of several kinds, which `make test` runs with three steps.
SELECTION = (
    *("kl_term", "byol", "branch_on_loss", "logged_metric", "finite_loss", "small_unet", "pruned"),
    *("global_list", "kept_features", "grad_cam", "wasserstein_penalty"),
)


def test_programs_of_several_kinds_train_as_on_one_device() -> None:
    check([replace(CASES[name], epochs=1, samples=20) for name in SELECTION], [1, 1])


@pytest.mark.cluster
@pytest.mark.parametrize("replicas", [[2, 1], [1, 2], [1, 1, 1]], ids=str)
def test_programs_train_as_on_one_device_with_replicas_and_three_stages(replicas: list[int]) -> None:
    check([replace(CASES[name], epochs=1) for name in SELECTION], replicas)
