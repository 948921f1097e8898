"""What `make test-gpu` runs on GPUs runs at all."""

import pytest


def test_a_rehearsal_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import checks  # Here, as it asks for CUDA, and each test is forked.

    if checks.ON_GPU:
        pytest.skip("there is a GPU: make test-gpu")
    monkeypatch.setattr(checks, "STEPS", 3)
    monkeypatch.setattr(checks, "BATCH", 2)
    rows = dict([*checks.comparison(), *checks.speed()])
    assert len(rows) == 1 + 3
    assert all(rows.values())
