"""What `make test-gpu` runs on GPUs runs at all."""

import pytest


def test_a_rehearsal_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import checks  # Here, as it asks for CUDA, and each test is forked.

    if checks.ON_GPU:
        pytest.skip("there is a GPU: make test-gpu")
    monkeypatch.setattr(checks, "STEPS", 3)
    rows = dict([*checks.lazy_loading(), *checks.comparison(), *checks.waits(), *checks.speed()])
    assert len(rows) == 1 + 4 + 3
    assert all(rows.values())
