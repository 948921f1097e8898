"""Test of a network whose activations fit into the memory of two processes, and not into that of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.strategies import memory_program

pytestmark = pytest.mark.cluster


def fit(strategy: str) -> tuple[int, str]:
    """Train with processes that may each take nine tenths of all activations, and return code and output."""
    limit = memory_program.ACTIVATION * memory_program.LAYERS * 9 // 10
    # Each thread of glibc's allocator would otherwise take addresses that it does not use.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(memory_program.__file__), strategy, str(limit)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return result.returncode, result.stdout + result.stderr


def test_activations_that_exceed_one_process_do_not_train_on_one() -> None:
    code, output = fit("auto")
    assert code != 0
    assert "can't allocate memory" in output, output


@pytest.mark.parametrize("strategy", ["hybrid_pipeline", "spatial"])
def test_these_activations_train_on_two_with_automatic_cuts_or_with_parts_of_images(strategy: str) -> None:
    code, output = fit(strategy)
    assert code == 0, output
    assert "trained steps: 1" in output
