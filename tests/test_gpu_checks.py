"""The checks that `make test-gpu` runs on GPUs also run on a CPU, or on a simulated GPU, as a rehearsal."""

import os

import pytest
import torch
from torch import Tensor, nn

from tests.runner.ranks import run_ranks
from tests.runner.simulated_cuda import simulate


def small_network(batch_norm: bool) -> nn.Module:
    """Return a network whose last images have too few rows for two ranks."""
    layers = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU()
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 10))


def train_on_one_card() -> dict[str, Tensor]:
    """Train as the ranks of `one_card.py` do, on a simulated GPU, with parts of images of 16 x 16 pixels."""
    variables = {"LOCAL_RANK": "0", "NODE_RANK": str(torch.distributed.get_rank()), "RANKS": "2"}
    os.environ |= {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with simulate():
        from tests.gpu import one_card  # Imported here, because the module asks for CUDA.

        one_card.BATCH, one_card.STEPS, one_card.SIZE = 4, 4, 16
        one_card.network = small_network
        case = {"batch_norm": True, "channels_last": True, "precision": "bf16-mixed", "no_waits": True}
        return one_card.train(*one_card.strategy_of("spatial", 2, case), case)


def test_ranks_with_parts_of_images_train_on_one_card() -> None:
    first, second = run_ranks(2, train_on_one_card)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.cluster
def test_the_gpu_checks_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import checks  # Imported here, in the test's forked process, because the module asks for CUDA.

    if checks.ON_GPU:
        pytest.skip("there is a GPU: make test-gpu")
    monkeypatch.setattr(checks, "STEPS", 3)
    monkeypatch.setattr(checks, "BATCH", 4)
    monkeypatch.setattr(checks, "PREDICTED", checks.PREDICTED[:1])
    rows = dict([*checks.waits(), *checks.speed(), *checks.peaks()])
    assert len(rows) == 4 + 3 + 1
    assert all(rows.values())
