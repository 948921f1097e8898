"""The checks that `make test-gpu` runs on GPUs also run on a CPU, as a rehearsal."""

import pytest


@pytest.mark.cluster
def test_the_gpu_checks_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import checks  # Imported here, in the test's forked process, because the module asks for CUDA.

    if checks.ON_GPU:
        pytest.skip("there is a GPU: make test-gpu")
    monkeypatch.setattr(checks, "STEPS", 3)
    monkeypatch.setattr(checks, "BATCH", 4)
    rows = dict([*checks.waits(), *checks.speed()])
    assert len(rows) == 4 + 3
    assert all(rows.values())
